// The only file that knows Python. It checks what it is given, so that no call can read or write
// out of bounds, releases the GIL, and calls the core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <optional>
#include <string>

#include "factormax/batch.hpp"
#include "factormax/parallel.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using factormax::Batched;
using factormax::Problem;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OptionalMatrix = std::optional<Matrix<T>>;

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

// The shape must be (batch, columns), or (1, columns) if the array may be shared.
template <class T>
Batched<T> batched(const Matrix<T>& array, std::size_t batch, std::size_t columns, const char* name,
                   bool may_share = true) {
  const bool fits =
      array.shape(1) == columns && (array.shape(0) == batch || (may_share && array.shape(0) == 1));
  if (!fits) {
    throw nb::value_error((std::string(name) + " has the wrong shape").c_str());
  }
  return {array.data(), array.shape(0) == batch ? static_cast<std::int64_t>(columns) : 0};
}

template <class T>
void require_range(const T* values, std::size_t count, T end, const char* name) {
  T low = 0, high = 0;
  for (std::size_t k = 0; k < count; ++k) {
    low = std::min(low, values[k]);
    high = std::max(high, values[k]);
  }
  if (low < 0 || (count > 0 && high >= end)) {
    throw nb::value_error((std::string(name) + " holds an index out of range").c_str());
  }
}

void require_offsets(const Vector<const std::int32_t>& ptr, std::size_t end, const char* name) {
  const std::size_t size = ptr.shape(0);
  bool valid = size > 0 && ptr(0) == 0 && static_cast<std::size_t>(ptr(size - 1)) == end;
  for (std::size_t k = 1; valid && k < size; ++k) valid = ptr(k - 1) <= ptr(k);
  if (!valid) throw nb::value_error((std::string(name) + " is not a list of offsets").c_str());
}

// The index arrays of a compiled graph: `factormax.compiled.CompiledGraph`, passed through.
struct Arrays {
  Vector<const std::int32_t> row_ptr;
  Matrix<const std::int32_t> col;
  Matrix<const std::int8_t> kind;
  Matrix<const std::int32_t> pairs;
  Matrix<const std::uint8_t> pair_negated;
  Vector<const std::int32_t> block_ptr;
  Vector<const std::int8_t> block_kind;
  Vector<const std::uint8_t> block_isolated;
};

template <class T>
Problem<T> make_problem(const Arrays& a, const Matrix<const T>& coef, const Matrix<const T>& rhs,
                        const OptionalMatrix<const std::uint8_t>& mask,
                        const Matrix<const T>& eta_u, const Matrix<const T>& eta_v) {
  const std::size_t batch = eta_u.shape(0), n = eta_u.shape(1);
  const std::size_t rows = a.kind.shape(1), entries = a.col.shape(1), pairs = a.pairs.shape(0);
  const std::size_t limit = std::size_t(1) << 30;
  require(n < limit && rows + pairs < limit && entries + 2 * pairs < limit,
          "the graph is too large: the core indexes with 32 bits");
  Problem<T> p;
  p.num_vars = static_cast<int>(n);
  p.num_rows = static_cast<int>(rows);
  p.num_entries = static_cast<int>(entries);
  p.num_pairs = static_cast<int>(pairs);
  p.num_blocks = static_cast<int>(a.block_kind.shape(0));
  require(a.row_ptr.shape(0) == rows + 1, "row_ptr has the wrong shape");
  require_offsets(a.row_ptr, entries, "row_ptr");
  require(a.block_ptr.shape(0) == a.block_kind.shape(0) + 1, "block_ptr has the wrong shape");
  require_offsets(a.block_ptr, rows, "block_ptr");
  require(a.pairs.shape(1) == 2 && a.pair_negated.shape(1) == 2 && a.pair_negated.shape(0) == pairs,
          "pairs have the wrong shape");
  require(a.block_isolated.shape(0) == a.block_kind.shape(0) + pairs,
          "block_isolated has the wrong shape");
  p.row_ptr = a.row_ptr.data();
  p.col = batched(a.col, batch, entries, "col");
  p.coef = batched(coef, batch, entries, "coef");
  p.rhs = batched(rhs, batch, rows, "rhs");
  p.kind = batched(a.kind, batch, rows, "kind");
  require_range(a.col.data(), a.col.size(), static_cast<std::int32_t>(n), "col");
  require_range(a.pairs.data(), a.pairs.size(), static_cast<std::int32_t>(n), "pairs");
  p.pair_var = a.pairs.data();
  p.pair_negated = a.pair_negated.data();
  p.block_ptr = a.block_ptr.data();
  p.block_kind = a.block_kind.data();
  p.block_isolated = a.block_isolated.data();
  for (int f = 0; f < p.num_blocks; ++f) {
    const int count = p.block_ptr[f + 1] - p.block_ptr[f];
    const auto kind = static_cast<factormax::BlockKind>(p.block_kind[f]);
    const bool fits = kind == factormax::BlockKind::row
                          ? count == 1
                          : kind == factormax::BlockKind::or_out && count >= 1;
    require(fits, "a block has the wrong kind or number of rows");
  }
  if (mask) p.mask = batched(*mask, batch, n, "mask");
  p.eta_u = batched(eta_u, batch, n, "eta_u");
  p.eta_v = batched(eta_v, batch, pairs, "eta_v");
  return p;
}

// Asks Python for a pending Ctrl-C a few times a second.
bool poll_signals() {
  using clock = std::chrono::steady_clock;
  thread_local clock::time_point last = clock::now();
  const clock::time_point now = clock::now();
  if (now - last < std::chrono::milliseconds(100)) return false;
  last = now;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void raise_if_failed(const factormax::Control& control) {
  if (control.out_of_memory.load()) throw std::bad_alloc();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

#define FACTORMAX_STRUCTURE_PARAMETERS                                                       \
  Vector<const std::int32_t> row_ptr, Matrix<const std::int32_t> col, Matrix<const T> coef,  \
      Matrix<const T> rhs, Matrix<const std::int8_t> kind, Matrix<const std::int32_t> pairs, \
      Matrix<const std::uint8_t> pair_negated, Vector<const std::int32_t> block_ptr,         \
      Vector<const std::int8_t> block_kind, Vector<const std::uint8_t> block_isolated,       \
      OptionalMatrix<const std::uint8_t> mask, Matrix<const T> eta_u, Matrix<const T> eta_v

#define FACTORMAX_STRUCTURE_ARRAYS \
  Arrays { row_ptr, col, kind, pairs, pair_negated, block_ptr, block_kind, block_isolated }

#define FACTORMAX_STRUCTURE_NAMES                                                                \
  "row_ptr"_a, "col"_a, "coef"_a, "rhs"_a, "kind"_a, "pairs"_a, "pair_negated"_a, "block_ptr"_a, \
      "block_kind"_a, "block_isolated"_a, "mask"_a.none(), "eta_u"_a, "eta_v"_a

template <class T>
void solve(FACTORMAX_STRUCTURE_PARAMETERS, OptionalMatrix<const T> warm, int method, double tol,
           int max_iter, double step_size, Matrix<T> mu, Matrix<T> mu_v, Matrix<T> tau,
           Matrix<std::int8_t> var_side, Matrix<std::int8_t> row_side, Vector<double> objective,
           Vector<double> primal_residual, Vector<double> dual_residual,
           Vector<std::int32_t> iterations, Vector<std::int32_t> status) {
  const Problem<T> p = make_problem<T>(FACTORMAX_STRUCTURE_ARRAYS, coef, rhs, mask, eta_u, eta_v);
  const std::size_t batch = eta_u.shape(0), n = p.num_vars, rows = p.num_dual();
  require(method == 0 || method == 1, "method must be 0 (compact) or 1 (ADMM)");
  require(objective.shape(0) == batch && primal_residual.shape(0) == batch &&
              dual_residual.shape(0) == batch && iterations.shape(0) == batch &&
              status.shape(0) == batch,
          "a per-instance output has the wrong shape");
  factormax::Outputs<T> out;
  out.mu = batched(mu, batch, n, "mu", false);
  out.mu_v = batched(mu_v, batch, p.num_pairs, "mu_v", false);
  out.tau = batched(tau, batch, rows, "tau", false);
  out.var_side = batched(var_side, batch, n, "var_side", false);
  out.row_side = batched(row_side, batch, rows, "row_side", false);
  out.objective = objective.data();
  out.primal_residual = primal_residual.data();
  out.dual_residual = dual_residual.data();
  out.iterations = iterations.data();
  out.status = status.data();
  factormax::Options options;
  options.tol = tol;
  options.max_iter = max_iter;
  options.step_size = step_size;
  Batched<const T> start;
  if (warm) start = batched(*warm, batch, rows, "warm");
  factormax::Control control;
  control.poll = &poll_signals;
  {
    nb::gil_scoped_release release;
    factormax::solve_batch<T>(p, static_cast<std::int64_t>(batch),
                              static_cast<factormax::Method>(method), options, start, out, control);
  }
  raise_if_failed(control);
}

template <class T>
void vjp(FACTORMAX_STRUCTURE_PARAMETERS, Matrix<const T> grad_mu, Matrix<const T> grad_mu_v,
         Matrix<const std::int8_t> var_side, Matrix<const std::int8_t> row_side,
         Vector<const std::int32_t> status, Matrix<T> grad_eta_u, Matrix<T> grad_eta_v,
         Vector<double> residual) {
  const Problem<T> p = make_problem<T>(FACTORMAX_STRUCTURE_ARRAYS, coef, rhs, mask, eta_u, eta_v);
  const std::size_t batch = eta_u.shape(0), n = p.num_vars, rows = p.num_dual();
  require(status.shape(0) == batch && residual.shape(0) == batch,
          "a per-instance array has the wrong shape");
  factormax::BatchGradients<T> grads;
  grads.grad_mu = batched(grad_mu, batch, n, "grad_mu");
  grads.grad_mu_v = batched(grad_mu_v, batch, p.num_pairs, "grad_mu_v");
  grads.var_side = batched(var_side, batch, n, "var_side");
  grads.row_side = batched(row_side, batch, rows, "row_side");
  grads.status = status.data();
  grads.grad_eta_u = batched(grad_eta_u, batch, n, "grad_eta_u", false);
  grads.grad_eta_v = batched(grad_eta_v, batch, p.num_pairs, "grad_eta_v", false);
  grads.residual = residual.data();
  factormax::Control control;
  control.poll = &poll_signals;
  {
    nb::gil_scoped_release release;
    factormax::vjp_batch<T>(p, static_cast<std::int64_t>(batch), grads, control);
  }
  raise_if_failed(control);
}

template <class T>
std::size_t workspace_bytes(FACTORMAX_STRUCTURE_PARAMETERS, int method) {
  const Problem<T> p = make_problem<T>(FACTORMAX_STRUCTURE_ARRAYS, coef, rhs, mask, eta_u, eta_v);
  return factormax::workspace_bytes<T>(p, static_cast<factormax::Method>(method));
}

template <class T>
void bind(nb::module_& m) {
  m.def("solve", &solve<T>, FACTORMAX_STRUCTURE_NAMES, "warm"_a.none(), "method"_a, "tol"_a,
        "max_iter"_a, "step_size"_a, "mu"_a.noconvert(), "mu_v"_a.noconvert(), "tau"_a.noconvert(),
        "var_side"_a.noconvert(), "row_side"_a.noconvert(), "objective"_a.noconvert(),
        "primal_residual"_a.noconvert(), "dual_residual"_a.noconvert(), "iterations"_a.noconvert(),
        "status"_a.noconvert(), "Solve a batch of instances into the given output arrays.");
  m.def("vjp", &vjp<T>, FACTORMAX_STRUCTURE_NAMES, "grad_mu"_a, "grad_mu_v"_a, "var_side"_a,
        "row_side"_a, "status"_a, "grad_eta_u"_a.noconvert(), "grad_eta_v"_a.noconvert(),
        "residual"_a.noconvert(), "Differentiate a solved batch into the given output arrays.");
  m.def("workspace_bytes", &workspace_bytes<T>, FACTORMAX_STRUCTURE_NAMES, "method"_a,
        "Bytes of working memory that one thread uses.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of factormax.";
  bind<double>(m);
  bind<float>(m);
  m.def("set_num_threads", &factormax::set_num_threads, "threads"_a);
  m.def("get_num_threads", &factormax::get_num_threads);
}
