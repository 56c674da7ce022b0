// The typed model: rows, rules, parts, groups, and what they are compiled to.
#include "factormax/model.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bindings.hpp"

namespace factormax::python {

using namespace nb::literals;

namespace {

// A view of an array of the model.
template <class U>
NumpyVector<const U> view(nb::handle owner, const std::vector<U>& values) {
  return {values.data(), {values.size()}, owner};
}

template <class U, class Get>
auto viewer(Get get) {
  return [get](nb::handle self) { return view<U>(self, get(nb::cast<const Model&>(self))); };
}

std::shared_ptr<const Model> make_model(std::int64_t num_variables,
                                        const std::vector<Group>& groups) {
  std::string error;
  std::shared_ptr<const Model> model = Model::make(num_variables, groups, error);
  if (model == nullptr) throw nb::value_error(error.c_str());
  return model;
}

void bind_rules(nb::module_& m) {
  nb::class_<Row>(m, "Row", "One row of a factor over literals l: s . l <= b, or s . l = b.")
      .def(
          "__init__",
          [](Row* self, std::vector<double> coefs, double bound, bool equality,
             std::optional<std::vector<std::int32_t>> literals, int coef_param, int bound_param) {
            std::vector<std::int32_t> all(coefs.size());
            for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
            new (self) Row{literals ? *literals : all,
                           coefs,
                           bound,
                           equality ? RowKind::equality : RowKind::inequality,
                           coef_param,
                           bound_param};
          },
          "coefs"_a, "bound"_a, nb::kw_only(), "equality"_a = false, "literals"_a = nb::none(),
          "coef_param"_a = -1, "bound_param"_a = -1,
          "`literals`: which ones the row is about, by default all. `coef_param`: the number of a\n"
          "parameter per literal, which multiplies the coefficients one by one. `bound_param`: "
          "the\n"
          "number of a parameter per factor, which multiplies the bound.");
  nb::class_<Rule>(m, "Rule", "How a kind of factor becomes rows.")
      .def(
          "__init__",
          [](Rule* self, std::string name, BlockKind block, int size,
             std::vector<std::uint8_t> per_literal, std::vector<Row> rows,
             std::vector<std::string> param_names) {
            new (self) Rule{std::move(name),        block,           size,
                            std::move(per_literal), std::move(rows), std::move(param_names)};
          },
          "name"_a, "block"_a, "size"_a, "per_literal"_a, "rows"_a, "param_names"_a);
}

void bind_groups(nb::module_& m) {
  nb::class_<Part>(m, "Part", "Literals of k factors: a strided view of the variables, or a list.")
      .def(
          "__init__",
          [](Part* self, bool negated, std::int64_t offset, std::vector<std::int64_t> outer,
             std::vector<std::int64_t> outer_strides, std::vector<std::int64_t> inner,
             std::vector<std::int64_t> inner_strides) {
            new (self) Part{negated,
                            offset,
                            std::move(outer),
                            std::move(outer_strides),
                            std::move(inner),
                            std::move(inner_strides),
                            {}};
          },
          "negated"_a, "offset"_a, "outer"_a, "outer_strides"_a, "inner"_a, "inner_strides"_a)
      .def_static(
          "listed",
          [](Matrix<const std::int64_t> literals) {
            const auto k = static_cast<std::int64_t>(literals.shape(0));
            const auto d = static_cast<std::int64_t>(literals.shape(1));
            Part part{false, 0, {k}, {0}, {d}, {0}, {}};
            part.literals.assign(literals.data(), literals.data() + literals.size());
            return part;
          },
          "literals"_a, "The literals themselves, (k, d): 2 * variable, and 1 more if negated.");
  nb::class_<Group>(m, "Group", "Factors of one kind.")
      .def_static(
          "rows",
          [](const Rule& rule, std::vector<Part> parts) {
            Group group;
            group.rule = std::make_shared<const Rule>(rule);
            group.parts = std::move(parts);
            return group;
          },
          "rule"_a, "parts"_a)
      .def_static(
          "pairs",
          [](std::vector<Part> parts) {
            Group group;
            group.parts = std::move(parts);
            return group;
          },
          "parts"_a)
      .def_static(
          "structured",
          [](std::string name, OracleKind oracle, std::vector<std::int32_t> shape,
             std::int32_t num_scores, int slots, int link, bool has_param,
             std::vector<Part> parts) {
            Group group;
            group.structured = true;
            group.name = std::move(name);
            group.oracle = oracle;
            group.shape = std::move(shape);
            group.num_scores = num_scores;
            group.slots = slots;
            group.link = link;
            group.has_param = has_param;
            group.parts = std::move(parts);
            return group;
          },
          "name"_a, "oracle"_a, "shape"_a, "num_scores"_a, "slots"_a, "link"_a, "has_param"_a,
          "parts"_a);
}

void bind_structured(nb::module_& m) {
  nb::class_<StructuredView>(m, "Structured", "A structured factor of a model.")
      .def_ro("name", &StructuredView::name)
      .def_ro("factor", &StructuredView::group, "Its number among the factors of the graph.")
      .def_ro("number", &StructuredView::number, "Which of the factors of one call it is.")
      .def_ro("kind", &StructuredView::kind)
      .def_ro("linked", &StructuredView::linked, "Whether it shares variables with an earlier one.")
      .def_prop_ro(
          "shape",
          [](nb::handle self) { return view(self, nb::cast<const StructuredView&>(self).shape); })
      .def_prop_ro("variables",
                   [](nb::handle self) {
                     return view(self, nb::cast<const StructuredView&>(self).variables);
                   })
      .def_ro("score_begin", &StructuredView::score_begin, "Where its scores begin in eta_v.")
      .def_ro("num_scores", &StructuredView::num_scores)
      .def_ro("slots", &StructuredView::slots, "How long a list of the variables that are on is.");
}

}  // namespace

void bind_model(nb::module_& m) {
  bind_rules(m);
  bind_groups(m);
  bind_structured(m);
  nb::class_<Model>(m, "Model", "A factor graph without its numbers, compiled and checked.")
      .def(nb::new_(&make_model), "num_variables"_a, "groups"_a)
      .def_prop_ro("num_variables", &Model::num_vars)
      .def_prop_ro("num_rows", &Model::num_rows)
      .def_prop_ro("num_entries", &Model::num_entries)
      .def_prop_ro("num_pairs", &Model::num_pairs)
      .def_prop_ro("num_scores", &Model::num_scores)
      .def_prop_ro("num_dual", &Model::num_dual)
      .def_prop_ro("num_structured", &Model::num_structured)
      .def_prop_ro("has_coef_params", &Model::has_coef_params,
                   "Whether coefficients of rows depend on parameters.")
      .def_prop_ro("bounded", &Model::bounded,
                   "The same with a row for each variable that a solve may hold at 0 or 1.")
      .def_prop_ro("row_ptr", viewer<std::int32_t>([](auto& g) -> auto& { return g.row_ptr(); }))
      .def_prop_ro("col", viewer<std::int32_t>([](auto& g) -> auto& { return g.col(); }))
      .def_prop_ro("row_kind", viewer<std::int8_t>([](auto& g) -> auto& { return g.row_kind(); }))
      .def_prop_ro("block_ptr",
                   viewer<std::int32_t>([](auto& g) -> auto& { return g.block_ptr(); }))
      .def_prop_ro("block_kind",
                   viewer<std::int8_t>([](auto& g) -> auto& { return g.block_kind(); }))
      .def_prop_ro("pairs",
                   [](nb::handle self) {
                     const auto& g = nb::cast<const Model&>(self);
                     return NumpyMatrix<const std::int32_t>(g.pair_var().data(),
                                                            {std::size_t(g.num_pairs()), 2}, self);
                   })
      .def_prop_ro("pair_negated",
                   [](nb::handle self) {
                     const auto& g = nb::cast<const Model&>(self);
                     return NumpyMatrix<const bool>(
                         reinterpret_cast<const bool*>(g.pair_negated().data()),
                         {std::size_t(g.num_pairs()), 2}, self);
                   })
      .def_prop_ro("structured",
                   [](const Model& g) {
                     std::vector<StructuredView> all;
                     for (int f = 0; f < g.num_structured(); ++f) all.push_back(g.structured(f));
                     return all;
                   })
      .def(
          "place_of_block",
          [](const Model& g, int block) {
            std::tuple<int, int> place;
            g.place_of_block(block, std::get<0>(place), std::get<1>(place));
            return place;
          },
          "block"_a, "The factor of the graph that a block of rows is, and which of its k.");
}

}  // namespace factormax::python
