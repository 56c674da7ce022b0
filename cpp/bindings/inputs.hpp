// The numbers that a solve is given.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "arrays.hpp"
#include "factormax/model.hpp"
#include "factormax/problem.hpp"
#include "factormax/vector_ops.hpp"
#include "mixed_scores.hpp"

namespace factormax::python {

enum class Numbers { finite, minus_infinity, bad };  // bad: NaN, +inf, or -inf where it can't be

template <class T>
Numbers look_at(const T* values, std::size_t count, const std::uint8_t* mask) {
  if (all_finite(values, static_cast<std::int64_t>(count))) return Numbers::finite;
  Numbers found = Numbers::finite;
  for (std::size_t k = 0; k < count; ++k) {
    if (mask != nullptr && mask[k] == 0) continue;
    if (std::isnan(values[k]) || values[k] == std::numeric_limits<T>::infinity()) {
      return Numbers::bad;
    }
    if (std::isinf(values[k])) found = Numbers::minus_infinity;
  }
  return found;
}

// The same for the rows of a matrix; the first columns are scores of pairs, which can't be -inf.
template <class T>
Numbers look_at_factor_scores(const T* rows, std::size_t count, std::size_t columns, int pairs) {
  const Numbers found = look_at(rows, count * columns, nullptr);
  if (found != Numbers::minus_infinity) return found;
  for (std::size_t i = 0; i < count; ++i) {
    const Numbers own = look_at(rows + i * columns, static_cast<std::size_t>(pairs), nullptr);
    if (own != Numbers::finite) return Numbers::bad;
  }
  return found;
}

// The numbers of a batch of instances of a model. The arrays are kept alive, and never written to;
// the rows are computed once, for the solve and for its derivative.
class Inputs {
 public:
  template <class T>
  struct Typed {
    Problem<T> problem;
    std::vector<T> coef, rhs;
  };

  // shared: the factor scores that all instances share, if eta_v holds only the others. runs: how
  // many scores are shared, not shared, shared, and so on. heat: (B, 1), what divides the shared
  // ones of each instance.
  Inputs(std::shared_ptr<const Model> model, nb::object eta_u, nb::object eta_v,
         std::vector<nb::object> params, std::optional<Matrix<const bool>> mask,
         std::optional<Matrix<const std::int8_t>> held, nb::object shared,
         const std::vector<int>& runs, std::optional<Matrix<const double>> heat)
      : model_(held ? model->bounded() : std::move(model)),
        mask_(std::move(mask)),
        held_(std::move(held)),
        heat_(std::move(heat)),
        kept_(nb::make_tuple(eta_u, eta_v, shared)) {
    if (!take<double>(eta_u, eta_v, shared, params, runs) &&
        !take<float>(eta_u, eta_v, shared, params, runs)) {
      throw nb::value_error("eta_u and eta_v must be contiguous matrices of one real dtype");
    }
  }

  const Model& model() const { return *model_; }
  std::size_t batch() const { return batch_; }
  bool is_double() const { return std::holds_alternative<Typed<double>>(numbers_); }
  template <class T>
  const Typed<T>& typed() const {
    return std::get<Typed<T>>(numbers_);
  }
  Numbers scores() const { return scores_; }
  Numbers factor_scores() const { return factor_scores_; }
  // Which factor scores the instances share.
  const ScoreRuns& runs() const { return runs_; }

  // Which variables are present: neither masked nor with a score of -inf. None if all are.
  nb::object mask(nb::handle self) const {
    if (here_.empty()) return nb::none();
    return nb::cast(NumpyMatrix<const bool>(reinterpret_cast<const bool*>(here_.data()),
                                            {batch_, std::size_t(model_->num_vars())}, self));
  }

  NumpyMatrix<const double> oracle_params(nb::handle self) const {
    const std::size_t factors = static_cast<std::size_t>(model_->num_structured());
    return {
        oracle_params_.data(), {factors == 0 ? 1 : oracle_params_.size() / factors, factors}, self};
  }

 private:
  void take_params(const std::vector<nb::object>& params) {
    const auto& sizes = model_->param_sizes();
    require(params.size() == sizes.size(), "params: one for each parameter of each factor");
    params_.resize(sizes.size());
    scalars_.resize(sizes.size());
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const nb::handle given = params[k];
      if (PyFloat_Check(given.ptr())) {
        scalars_[k] = PyFloat_AsDouble(given.ptr());
        params_[k] = {&scalars_[k], 0, 0};
        continue;
      }
      Matrix<const double> array;
      require(nb::try_cast(given, array, false), "params must be contiguous matrices of float64");
      const auto rows = batched(array, batch_, static_cast<std::size_t>(sizes[k]), "params");
      params_[k] = {rows.data, array.shape(0) == 1 ? 0 : rows.stride, 1};
      per_instance_ = per_instance_ || array.shape(0) != 1;
    }
  }

  // False if they do not have this dtype.
  template <class T>
  bool take(nb::handle given_u, nb::handle given_v, nb::handle given_shared,
            const std::vector<nb::object>& params, const std::vector<int>& runs) {
    Matrix<const T> eta_u, eta_v, shared;
    if (!nb::try_cast(given_u, eta_u, false) || !nb::try_cast(given_v, eta_v, false)) return false;
    const bool mixed = !given_shared.is_none();
    if (mixed && !nb::try_cast(given_shared, shared, false)) return false;
    Typed<T>& typed = numbers_.emplace<Typed<T>>();
    batch_ = held_ ? held_->shape(0) : eta_u.shape(0);
    take_params(params);
    Problem<T>& p = typed.problem = model_->problem<T>();
    const int scores = model_->num_scores();
    p.eta_u = batched(eta_u, batch_, std::size_t(p.num_vars), "eta_u");
    if (mixed) {
      runs_ = {runs, scores};
      p.mixed.runs = runs_.span();
      p.mixed.shared = batched(shared, 1, runs_.num_shared, "shared").data;
      p.mixed.own = batched(eta_v, batch_, std::size_t(scores) - runs_.num_shared, "eta_v");
      if (heat_) p.mixed.heat = batched(*heat_, batch_, 1, "heat");
      look_at_mixed(eta_v, p.mixed.shared);
    } else {
      p.eta_v = batched(eta_v, batch_, std::size_t(scores), "eta_v");
      runs_ = {eta_v.shape(0) == 1 ? std::vector<int>{scores} : std::vector<int>{0, scores},
               scores};
      factor_scores_ = look_at_factor_scores(eta_v.data(), eta_v.shape(0), std::size_t(scores),
                                             model_->num_pairs());
    }
    if (batch_ > 0) compute(eta_u, typed);
    return true;
  }

  // own: (1 | B, P - S).
  template <class T>
  void look_at_mixed(const Matrix<const T>& own, const T* shared) {
    const int pairs = model_->num_pairs(), shared_pairs = runs_.shared_before(pairs);
    factor_scores_ =
        look_at_factor_scores(own.data(), own.shape(0), own.shape(1), pairs - shared_pairs);
    std::vector<T> cooled;
    if (heat_) {
      const Span<const double> heat{heat_->data(), static_cast<int>(heat_->size())};
      cooled = coldest(Span<const T>{shared, static_cast<int>(runs_.num_shared)}, heat);
      shared = cooled.data();
    }
    factor_scores_ =
        std::max(factor_scores_, look_at_factor_scores(shared, 1, runs_.num_shared, shared_pairs));
  }

  // What follows from the numbers.
  template <class T>
  void compute(const Matrix<const T>& eta_u, Typed<T>& typed) {
    Problem<T>& p = typed.problem;
    const std::size_t n = static_cast<std::size_t>(p.num_vars);
    combine_mask(p.eta_u, eta_u);
    if (!here_.empty()) p.mask = {here_.data(), static_cast<std::int64_t>(n)};
    write_rows(typed);
    // Parameters of structured factors.
    const std::size_t factors = static_cast<std::size_t>(model_->num_structured());
    const std::size_t lead = per_instance_ ? batch_ : 1;
    oracle_params_.resize(lead * factors);
    for (std::size_t i = 0; i < lead; ++i) {
      model_->write_oracle_params(params_, static_cast<std::int64_t>(i),
                                  oracle_params_.data() + i * factors);
    }
    p.structured.param = {oracle_params_.data(), lead > 1 ? static_cast<std::int64_t>(factors) : 0};
  }

  template <class T>
  void combine_mask(const Batched<const T>& scores, const Matrix<const T>& given) {
    const std::size_t n = static_cast<std::size_t>(model_->num_vars());
    if (!mask_) {
      scores_ = look_at(given.data(), given.size(), nullptr);
      if (scores_ != Numbers::minus_infinity) return;
    }
    Batched<const bool> masked;
    if (mask_) masked = batched(*mask_, batch_, n, "mask");
    here_.resize(batch_ * n);
    bool all = true;
    for (std::size_t i = 0; i < batch_; ++i) {
      const T* score = scores.at(static_cast<std::int64_t>(i));
      const bool* own = masked.at(static_cast<std::int64_t>(i));
      std::uint8_t* out = here_.data() + i * n;
      for (std::size_t j = 0; j < n; ++j) {
        out[j] = (own == nullptr || own[j]) && score[j] != -std::numeric_limits<T>::infinity();
        all = all && out[j] != 0;
      }
      if (look_at(score, n, out) == Numbers::bad) scores_ = Numbers::bad;
    }
    if (all) here_.clear();
  }

  template <class T>
  void write_rows(Typed<T>& typed) {
    Problem<T>& p = typed.problem;
    const bool per_instance = per_instance_ && model_->has_row_params();
    const std::int8_t* held = held_ ? held_->data() : nullptr;
    if (held_) require(held_->shape(1) == std::size_t(p.num_vars), "held has the wrong shape");
    const bool constant = !held_ && !model_->has_coef_params();
    const std::size_t coef_rows = constant ? 0 : held_ || per_instance ? batch_ : 1;
    const std::size_t rhs_rows = held_ || per_instance ? batch_ : 1;
    typed.coef.resize(coef_rows * static_cast<std::size_t>(p.num_entries));
    typed.rhs.resize(rhs_rows * static_cast<std::size_t>(p.num_rows));
    const auto held_of = [&](std::size_t i) { return held_ ? held + i * p.num_vars : nullptr; };
    for (std::size_t i = 0; i < coef_rows; ++i) {
      model_->write_coefs(params_, static_cast<std::int64_t>(i), held_of(i),
                          typed.coef.data() + i * p.num_entries);
    }
    for (std::size_t i = 0; i < rhs_rows; ++i) {
      model_->write_bounds(params_, static_cast<std::int64_t>(i), held_of(i),
                           typed.rhs.data() + i * p.num_rows);
    }
    p.constant_coefs = constant;
    p.coef = {constant ? model_->constant_coefs<T>() : typed.coef.data(),
              coef_rows > 1 ? p.num_entries : 0};
    p.rhs = {typed.rhs.data(), rhs_rows > 1 ? p.num_rows : 0};
  }

  std::shared_ptr<const Model> model_;
  std::optional<Matrix<const bool>> mask_;
  std::optional<Matrix<const std::int8_t>> held_;
  std::optional<Matrix<const double>> heat_;
  nb::object kept_;
  std::vector<double> scalars_, oracle_params_;
  std::vector<Param> params_;
  std::size_t batch_ = 0;
  bool per_instance_ = false;       // whether any parameter is per instance
  std::vector<std::uint8_t> here_;  // (B, n) variables that are present, or empty if all are
  Numbers scores_ = Numbers::finite, factor_scores_ = Numbers::finite;
  ScoreRuns runs_;
  std::variant<std::monostate, Typed<double>, Typed<float>> numbers_;
};

}  // namespace factormax::python
