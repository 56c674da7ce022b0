#include "factormax/lone_rows.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "factormax/parallel.hpp"
#include "row_solver.hpp"
#include "thread_memory.hpp"

namespace factormax {

namespace {

constexpr std::int64_t kGrain = 4096;  // variables; less is not worth another thread

// If a row can't hold, nothing is left of its instance but the proof.
template <class T>
void write_ended(const Problem<T>& p, std::int64_t i, const Ended& ended, const Outputs<T>& out) {
  const bool infeasible = ended.refuted >= 0;
  const double inf = std::numeric_limits<double>::infinity();
  out.objective[i] = infeasible ? -inf : ended.objective;
  if (!infeasible) {
    const Status status = ended.converged ? Status::converged : Status::stalled;
    return write_result({status, 1, 0, ended.residual, ended.residual}, i, out);
  }
  write_result({Status::infeasible, 0, 0, inf, 0}, i, out);
  const std::uint8_t* mask = p.mask.at(i);
  const T* eta = p.eta_u.at(i);
  for (int j = 0; j < p.num_vars; ++j) {
    out.mu.at(i)[j] = is_present(mask, eta, j) ? std::numeric_limits<T>::quiet_NaN() : T(0);
  }
  const auto absent = static_cast<std::int8_t>(Side::absent);
  std::fill_n(out.tau.at(i), p.num_rows, T(0));
  std::fill_n(out.var_side.at(i), p.num_vars, absent);
  std::fill_n(out.row_side.at(i), p.num_rows, absent);
  out.tau.at(i)[ended.refuted] = static_cast<T>(ended.refuting);
}

// Calls work(worker, i, chunk) for all chunks of all instances; small instances are taken several
// at a time. make() is called by each thread.
template <class Make, class Work>
void for_chunks(const Layout& p, std::int64_t batch, const Make& make, const Work& work,
                Control& control) {
  const std::int64_t chunks = p.lone_rows->num_chunks();
  const std::int64_t together =
      chunks > 1 ? 1 : std::max<std::int64_t>(1, kGrain / std::max(p.num_vars, 1));
  const std::int64_t items = (batch + together - 1) / together;
  parallel_for(
      items * chunks,
      [&]() -> Worker {
        auto worker = make();
        return [&, worker, chunks, together](std::int64_t item, bool is_caller) {
          if (control.stopped(is_caller)) return;
          const std::int64_t first = item / chunks * together;
          const std::int64_t last = std::min(batch, first + together);
          for (std::int64_t i = first; i < last; ++i) {
            work(*worker, i, static_cast<int>(item % chunks));
          }
        };
      },
      [&] { control.stopped(true); });
}

}  // namespace

// ---- The rows of a layout

std::unique_ptr<const LoneRows> LoneRows::of(const Layout& p, const double* coef) {
  if (p.num_pairs > 0 || p.structured.count > 0 || p.num_rows != p.num_blocks) return nullptr;
  auto made = std::make_unique<LoneRows>();
  std::vector<std::uint8_t> taken(static_cast<std::size_t>(p.num_vars), 0);
  made->rows_.reserve(static_cast<std::size_t>(p.num_rows) + 1);
  for (int f = 0; f < p.num_blocks; ++f) {
    const int r = p.block_ptr[f], begin = p.row_ptr[r], end = p.row_ptr[r + 1];
    const auto kind = static_cast<RowKind>(p.kind[r]);
    const bool plain = p.block_kind[f] == static_cast<std::int8_t>(BlockKind::row) &&
                       p.block_ptr[f + 1] == r + 1 && p.block_isolated[f] != 0 &&
                       kind != RowKind::absent;
    if (!plain) return nullptr;
    const double sign = begin < end ? coef[begin] : 1.0;
    const bool even = std::all_of(coef + begin, coef + end, [&](double a) { return a == sign; });
    if (!even || std::fabs(sign) != 1) return nullptr;
    for (int k = begin; k < end; ++k) taken[p.col[k]] = 1;
    made->add(
        {Indices::of(p.col + begin, end - begin), r, sign > 0 ? 1 : -1, kind == RowKind::equality});
  }
  for (int j = 0; j < p.num_vars; ++j) {
    if (taken[j] == 0) made->free_.push_back(j);
  }
  const int free = static_cast<int>(made->free_.size());
  if (free > 0) made->add({Indices::of(made->free_.data(), free), -1, 1, false});
  made->chunk_ptr_.push_back(static_cast<int>(made->rows_.size()));
  return made;
}

void LoneRows::add(const LoneRow& row) {
  if (in_chunk_ >= kGrain) {
    chunk_ptr_.push_back(static_cast<int>(rows_.size()));
    in_chunk_ = 0;
  }
  rows_.push_back(row);
  in_chunk_ += row.vars.count;
  longest_ = std::max(longest_, row.vars.count);
}

// ---- Entry points

template <class T>
std::size_t lone_row_bytes(const LoneRows& rows) {
  Workspace counter;
  RowSolver<T>(Problem<T>(), 0, Outputs<T>()).allocate(rows.longest(), counter);
  return counter.used();
}

template <class T>
void solve_lone_rows(const Problem<T>& p, std::int64_t batch, double tol, const Outputs<T>& out,
                     Control& control) {
  const LoneRows& rows = *p.lone_rows;
  const int chunks = rows.num_chunks();
  std::vector<Ended> ended(chunks > 1 ? batch * chunks : 0);
  struct State {
    State(const Problem<T>& p, double tol, const Outputs<T>& out, Control& control)
        : lease(memory_of_thread(), lone_row_bytes<T>(*p.lone_rows)), solver(p, tol, out) {
      if (lease.get() == nullptr) {
        control.fail_for_memory();
      } else {
        solver.allocate(p.lone_rows->longest(), *lease.get());
      }
    }
    ThreadMemory::Lease lease;
    RowSolver<T> solver;
  };
  const auto make = [&] { return std::make_shared<State>(p, tol, out, control); };
  const auto work = [&](State& state, std::int64_t i, int c) {
    Ended own;
    for (const LoneRow& row : rows.chunk(c)) state.solver.solve(i, row, own);
    if (chunks > 1) {
      ended[i * chunks + c] = own;
    } else {
      write_ended(p, i, own, out);
    }
  };
  for_chunks(p, batch, make, work, control);
  if (control.stop.load() || chunks == 1) return;
  for (std::int64_t i = 0; i < batch; ++i) {
    Ended all;
    for (int c = 0; c < chunks; ++c) all.add(ended[i * chunks + c]);
    write_ended(p, i, all, out);
  }
}

template <class T>
void vjp_lone_rows(const Problem<T>& p, std::int64_t batch, const BatchGradients<T>& grads,
                   Control& control) {
  // For rows whose variables do not lie side by side.
  struct Room {
    Room(int longest, Control& control)
        : lease(memory_of_thread(), static_cast<std::size_t>(longest) * (2 * sizeof(T) + 1) + 256) {
      if (Workspace* ws = lease.get()) {
        grad = ws->take<T>(longest);
        out = ws->take<T>(longest);
        side = ws->take<std::int8_t>(longest);
      } else {
        control.fail_for_memory();
      }
    }
    ThreadMemory::Lease lease;
    Span<T> grad, out;
    Span<std::int8_t> side;
  };
  const LoneRows& rows = *p.lone_rows;
  const auto make = [&] { return std::make_shared<Room>(rows.longest(), control); };
  const auto work = [&](Room& room, std::int64_t i, int c) {
    const bool infeasible = grads.status[i] == static_cast<std::int32_t>(Status::infeasible);
    const std::int8_t* row_side = grads.row_side.at(i);
    if (c == 0) grads.residual[i] = 0;
    for (const LoneRow& row : rows.chunk(c)) {
      const Indices& vars = row.vars;
      const T* grad = vars.gather(grads.grad_mu.at(i), room.grad.data);
      const std::int8_t* side = vars.gather(grads.var_side.at(i), room.side.data);
      T* own = vars.place(grads.grad_eta_u.at(i), room.out.data);
      if (infeasible) {
        std::fill_n(own, vars.count, T(0));
      } else {
        const bool tight =
            row.row >= 0 && row_side[row.row] == static_cast<std::int8_t>(Side::interior);
        pull_back(grad, side, vars.count, tight, own);
      }
      vars.scatter(own, grads.grad_eta_u.at(i));
    }
  };
  for_chunks(p, batch, make, work, control);
}

#define FACTORMAX_INSTANTIATE(T)                                                               \
  template std::size_t lone_row_bytes<T>(const LoneRows&);                                     \
  template void solve_lone_rows<T>(const Problem<T>&, std::int64_t, double, const Outputs<T>&, \
                                   Control&);                                                  \
  template void vjp_lone_rows<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&,    \
                                 Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
