// The coefficients and bounds of a model's rows, from the parameters of its factors.
#include <algorithm>
#include <cmath>

#include "factormax/model.hpp"
#include "row_bound.hpp"

namespace factormax {

namespace {

// A bound beyond all reason never binds, and must not become infinite.
double within_reason(double bound) { return std::min(std::max(bound, -1e30), 1e30); }

// What a row with a parameter for its coefficients is divided by, so that it is in units of
// variables.
double row_scale(const Row& row, const Param& param, std::int64_t i, std::int64_t first) {
  double largest = 0;
  for (std::size_t e = 0; e < row.literals.size(); ++e) {
    largest = std::max(largest, std::fabs(row.coefs[e] * param.at(i, first + row.literals[e])));
  }
  return largest > 0 ? largest : 1.0;
}

}  // namespace

// Calls visit(row of the rule, first parameter of the group, k times the literals of a factor, k,
// row, entry) for the rows of factor k of every group whose rule has parameters.
template <class Visit>
void Model::visit_rows(Visit visit) const {
  for (const Bundle& bundle : bundles_) {
    if (bundle.rule->num_params() == 0) continue;
    int r = bundle.first_row, entry = bundle.first_entry;
    for (const int g : bundle.groups) {
      for (std::int64_t k = 0; k < group_count_[g]; ++k) {
        for (const Row& row : bundle.rule->rows) {
          visit(row, first_param_[g], k * bundle.rule->size, k, r, entry);
          ++r;
          entry += static_cast<int>(row.literals.size());
        }
      }
    }
  }
}

template <>
const double* Model::constant_coefs<double>() const {
  return coef_.data();
}

template <>
const float* Model::constant_coefs<float>() const {
  std::call_once(narrow_once_, [this] {
    narrow_coef_.resize(coef_.size());
    write_coefs<float>({}, 0, nullptr, narrow_coef_.data());
  });
  return narrow_coef_.data();
}

template <class T>
void Model::write_coefs(const std::vector<Param>& params, std::int64_t instance,
                        const std::int8_t* held, T* coef) const {
  std::transform(coef_.begin(), coef_.end(), coef, [](double a) { return static_cast<T>(a); });
  visit_rows([&](const Row& row, int slots, std::int64_t literal, std::int64_t, int, int entry) {
    if (row.coef_param < 0) return;
    const Param& param = params[slots + row.coef_param];
    const double scale = row_scale(row, param, instance, literal);
    for (std::size_t e = 0; e < row.literals.size(); ++e) {
      const double a = row.coefs[e] * param.at(instance, literal + row.literals[e]) / scale;
      coef[entry + e] = static_cast<T>(entry_negated_[entry + e] != 0 ? -a : a);
    }
  });
  if (held == nullptr) return;
  // x <= 0, -x <= -1, or x <= 1, which says nothing.
  T* own = coef + num_entries() - num_vars_;
  for (int j = 0; j < num_vars_; ++j) own[j] = held[j] == 1 ? T(-1) : T(1);
}

template <class T>
void Model::write_bounds(const std::vector<Param>& params, std::int64_t instance,
                         const std::int8_t* held, T* rhs) const {
  std::transform(rhs_.begin(), rhs_.end(), rhs, [](double b) { return static_cast<T>(b); });
  visit_rows(
      [&](const Row& row, int slots, std::int64_t literal, std::int64_t k, int r, int entry) {
        double scale = 1, terms = 0, size = 0;
        if (row.coef_param >= 0)
          scale = row_scale(row, params[slots + row.coef_param], instance, literal);
        for (std::size_t e = 0; e < row.literals.size(); ++e) {
          if (entry_negated_[entry + e] == 0) continue;
          double a = row.coefs[e];
          if (row.coef_param >= 0) {
            a *= params[slots + row.coef_param].at(instance, literal + row.literals[e]) / scale;
          }
          terms += a;
          size += std::fabs(a);
        }
        double bound = row.bound;
        if (row.bound_param >= 0) bound *= params[slots + row.bound_param].at(instance, k);
        rhs[r] = static_cast<T>(within_reason(difference(bound / scale, terms, size)));
      });
  if (held == nullptr) return;
  T* own = rhs + num_rows() - num_vars_;
  for (int j = 0; j < num_vars_; ++j) own[j] = held[j] == 0 ? T(0) : held[j] == 1 ? T(-1) : T(1);
}

void Model::write_oracle_params(const std::vector<Param>& params, std::int64_t instance,
                                double* out) const {
  for (int f = 0; f < num_structured(); ++f) {
    const int g = oracle_group_[f];
    out[f] = groups_[g].has_param ? params[first_param_[g]].at(instance, oracle_number_[f]) : 0.0;
  }
}

#define FACTORMAX_INSTANTIATE(T)                                                                   \
  template void Model::write_coefs<T>(const std::vector<Param>&, std::int64_t, const std::int8_t*, \
                                      T*) const;                                                   \
  template void Model::write_bounds<T>(const std::vector<Param>&, std::int64_t,                    \
                                       const std::int8_t*, T*) const;

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
