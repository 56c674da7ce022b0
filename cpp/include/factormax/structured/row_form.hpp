// Trees and matchings by the rows of their polytopes, docs/math.md (59)-(61). An active set holds a
// structure for every dimension of the solution's face, which is expensive where scores are close
// to one another; the rows do not mind. A matching has a row for each of its rows and columns. A
// tree has one for each word, and one for each set of words that would otherwise form a cycle:
// those are added when they are violated.
//
// The rows join those of the graph in a Problem of their own, of a single instance, which the
// solver, the finish and the backward pass treat like any other.
#pragma once

#include "factormax/problem.hpp"
#include "factormax/structured/oracle.hpp"
#include "factormax/structured/tree_cuts.hpp"

namespace factormax {

template <class T>
class RowForm {
 public:
  // Whether all structured factors are of these kinds, and none is linked.
  static bool possible(const Problem<T>& p) {
    const Structured& s = p.structured;
    if (s.count == 0 || s.num_links > 0) return false;
    for (int f = 0; f < s.count; ++f) {
      if (!is_tree(s, f) && !is_matching(s, f)) return false;
    }
    return true;
  }

  // Whether instance i is likely to have enough structures that rows are the better way. Each row
  // of a matching, and of the arcs to a word, has one variable on in every structure. Sparsemax of
  // the row alone tells how many have a chance; an active set needs a structure for each but one.
  static bool is_dense(const Problem<T>& p, std::int64_t i) {
    const Structured& s = p.structured;
    const std::uint8_t* mask = p.mask.at(i);
    const T* eta = p.eta_u.at(i);
    for (int f = 0; f < s.count; ++f) {
      const int rows = s.shapes(f)[0], length = s.vars(f).size / std::max(rows, 1);
      int most = is_tree(s, f) ? kTreeStructures + rows / 2 : kMatchings;
      if (p.num_rows + p.num_pairs > 0) most /= kMorePasses;
      for (int r = 0, more = 0; r < rows; ++r) {
        more += support({s.vars(f).data + r * length, length}, mask, eta) - 1;
        if (more > most) return true;
      }
    }
    return false;
  }

  // A problem as large as this one can become; `p` must outlive it.
  Problem<T> largest(const Problem<T>& p) const {
    Problem<T> result = p;
    result.structured = {};
    for (int f = 0; f < p.structured.count; ++f) {
      const int rows = rows_of(p.structured, f), cuts = most_cuts(p.structured, f);
      const int vars = p.structured.vars(f).size;
      result.num_rows += rows + cuts;
      result.num_blocks += rows + cuts;
      result.num_entries += 2 * vars + (is_tree(p.structured, f) ? entries_of_cuts(vars) : 0);
    }
    return result;
  }

  void allocate(const Problem<T>& p, Workspace& ws) {
    size_ = largest(p);
    row_ptr_ = ws.take<std::int32_t>(size_.num_rows + 1);
    col_ = ws.take<std::int32_t>(size_.num_entries);
    coef_ = ws.take<T>(size_.num_entries);
    rhs_ = ws.take<T>(size_.num_rows);
    kind_ = ws.take<std::int8_t>(size_.num_rows);
    block_ptr_ = ws.take<std::int32_t>(size_.num_blocks + 1);
    block_kind_ = ws.take<std::int8_t>(size_.num_blocks);
    block_isolated_ = ws.take<std::uint8_t>(size_.num_blocks + size_.num_pairs);
    mask_ = ws.take<std::uint8_t>(p.num_vars);
    tau = ws.take<T>(size_.num_dual());
    row_side = ws.take<std::int8_t>(size_.num_dual());
    int words = 0, longest = 0;
    std::int64_t members = 0;
    most_cuts_ = 0;
    for (int f = 0; f < p.structured.count; ++f) {
      longest = std::max(longest, list_length(p.structured, f));
      if (!is_tree(p.structured, f)) continue;
      words = std::max(words, words_of(p.structured, f));
      most_cuts_ += most_cuts(p.structured, f);
      members += std::int64_t(most_cuts(p.structured, f)) * words_of(p.structured, f);
    }
    cut_factor_ = ws.take<std::int32_t>(most_cuts_);
    cut_begin_ = ws.take<std::int64_t>(most_cuts_ + 1);
    members_ = ws.take<std::uint8_t>(members);
    present_ = ws.take<std::uint8_t>(longest);
    cuts_.allocate(words, ws);
  }

  // Multipliers and sides of the larger problem, for those who solve it.
  Span<T> tau;                 // (R' + P,)
  Span<std::int8_t> row_side;  // (R' + P,)

  const Problem<T>& problem() const { return made_; }

  // Copies numbers of the graph's own rows and pairs to their places in the larger problem, and
  // back.
  template <class X>
  void take_rows(const X* graph, X* larger) const {
    std::copy(graph, graph + source_->num_rows, larger);
    std::copy_n(graph + source_->num_rows, source_->num_pairs, larger + size_.num_rows);
  }
  template <class X>
  void give_rows(const X* larger, X* graph) const {
    std::copy(larger, larger + source_->num_rows, graph);
    std::copy_n(larger + size_.num_rows, source_->num_pairs, graph + source_->num_rows);
  }

  // What the backward pass has to know about the rows of a factor, as lists of flags: for a tree,
  // the sets of words that hold tightly; for a matching, one list of its tight columns.
  static int list_length(const Structured& s, int f) {
    return is_tree(s, f) ? s.shapes(f)[0] : s.shapes(f)[1];
  }

  // Calls visit(flags) for each list of factor f, after the solution was written.
  template <class Visit>
  void tight_rows(int f, const Visit& visit) {
    if (!is_tree(source_->structured, f)) {
      const Span<std::uint8_t> tight = present_.first(list_length(source_->structured, f));
      for (int b = 0; b < tight.size; ++b) tight[b] = is_interior(first_column(f) + b);
      return visit(tight);
    }
    for (int c = 0; c < num_cuts_; ++c) {
      if (cut_factor_[c] == f && is_interior(first_cut_ + c)) visit(cut_members(c));
    }
  }

  // The other way round, after `begin`: marks which rows are tight, from `count` lists per factor.
  // Returns false if they are not of this problem.
  bool adopt(const std::int32_t* count, const std::uint8_t* flags) {
    const Structured& s = source_->structured;
    fill(row_side, static_cast<std::int8_t>(Side::interior));
    for (int f = 0; f < s.count; ++f) {
      const int length = list_length(s, f);
      for (int c = 0; c < count[f]; ++c, flags += length) {
        if (is_tree(s, f)) {
          if (!add_cut(f, {flags, length})) return false;
          continue;
        }
        for (int b = 0; b < length; ++b) {
          if (!flags[b]) row_side[first_column(f) + b] = static_cast<std::int8_t>(Side::lower);
        }
      }
    }
    return true;
  }

  // Lays out instance i without cuts. Returns false if that can't be done: a factor would lose all
  // its variables without the user having masked them.
  bool begin(const Problem<T>& p, std::int64_t i) {
    source_ = &p;
    left_out_ = false;
    eta_ = p.eta_u.at(i);
    const std::uint8_t* mask = p.mask.at(i);
    any_masked_ = mask != nullptr;
    if (any_masked_) std::copy(mask, mask + p.num_vars, mask_.data);
    num_cuts_ = 0;
    if (most_cuts_ > 0) cut_begin_[0] = 0;
    made_ = size_;
    made_.row_ptr = row_ptr_.data;
    made_.col = col_.data;
    made_.kind = kind_.data;
    // The stride says that instances differ: rows come and go.
    made_.coef = {coef_.data, 1};
    made_.rhs = {rhs_.data, 1};
    made_.block_ptr = block_ptr_.data;
    made_.block_kind = block_kind_.data;
    made_.block_isolated = block_isolated_.data;
    made_.eta_u = {eta_, 0};
    made_.eta_v = {p.eta_v.at(i), 0};
    std::copy(p.row_ptr, p.row_ptr + p.num_rows + 1, row_ptr_.data);
    std::copy(p.col, p.col + p.num_entries, col_.data);
    std::copy(p.coef.at(i), p.coef.at(i) + p.num_entries, coef_.data);
    std::copy(p.rhs.at(i), p.rhs.at(i) + p.num_rows, rhs_.data);
    std::copy(p.kind, p.kind + p.num_rows, kind_.data);
    std::copy(p.block_ptr, p.block_ptr + p.num_blocks + 1, block_ptr_.data);
    std::copy(p.block_kind, p.block_kind + p.num_blocks, block_kind_.data);
    std::copy(p.block_isolated, p.block_isolated + p.num_blocks, block_isolated_.data);
    rows_ = p.num_rows;
    blocks_ = p.num_blocks;
    for (int f = 0; f < p.structured.count; ++f) {
      if (is_tree(p.structured, f)) {
        add_tree(f);
      } else {
        add_matching(f);
      }
    }
    made_.mask = {any_masked_ ? mask_.data : nullptr, 0};
    first_cut_ = rows_;
    while (rows_ < size_.num_rows) {  // room for cuts
      kind_[rows_] = static_cast<std::int8_t>(RowKind::absent);
      row_ptr_[rows_ + 1] = row_ptr_[rows_];
      rhs_[rows_] = 0;
      end_block(false);
    }
    std::copy(p.block_isolated + p.num_blocks, p.block_isolated + p.num_blocks + p.num_pairs,
              block_isolated_.data + size_.num_blocks);
    return !(left_out_ && hides_factor(mask));
  }

  // A row for a set of words of tree f; false if there is no room for it.
  bool add_cut(int f, Span<const std::uint8_t> member) {
    const Structured& s = source_->structured;
    const Span<const std::int32_t> vars = s.vars(f);
    const int n = words_of(s, f), r = first_cut_ + num_cuts_;
    if (num_cuts_ == most_cuts_) return false;
    find_present(f);
    int inside = 0, outside = 0;
    for (int m = 0; m < n; ++m) (member[m] ? inside : outside) += present_[m];
    // As there is one head per word, "at least one head outside" is "fewer than all inside".
    const bool fewer_inside = inside - 1 <= outside + 1;
    const int most = inside * (fewer_inside ? inside - 1 : outside + 1);
    int e = row_ptr_[r];
    if (e + most > size_.num_entries) return false;
    for (int m = 0; m < n; ++m) {
      if (!member[m] || !present_[m]) continue;
      for (int h = 0; h < n; ++h) {
        const bool is_inside = h != m && member[h];
        if (is_inside != fewer_inside || !present_[h]) continue;
        col_[e] = vars[m * n + h];
        coef_[e++] = fewer_inside ? T(1) : T(-1);
      }
    }
    rhs_[r] = fewer_inside ? T(inside - 1) : T(-1);
    kind_[r] = static_cast<std::int8_t>(RowKind::inequality);
    for (int k = r + 1; k <= size_.num_rows; ++k) row_ptr_[k] = e;
    cut_factor_[num_cuts_] = f;
    cut_begin_[num_cuts_ + 1] = cut_begin_[num_cuts_] + n;
    std::copy(member.begin(), member.begin() + n, members_.data + cut_begin_[num_cuts_]);
    ++num_cuts_;
    return true;
  }

  // How many passes over the rows cost about as much as the structures would.
  template <class Marginal>
  int worthwhile_passes(const Marginal& mu) {
    const Structured& s = source_->structured;
    double cost = 0;
    for (int f = 0; f < s.count; ++f) {
      double structures = 0;
      for (const std::int32_t j : s.vars(f)) structures += mu(j) > 0;
      for (int m = 0; m < s.shapes(f)[0]; ++m) {
        structures -= kind_[first_row(f) + m] != static_cast<std::int8_t>(RowKind::absent);
      }
      cost += structures * structures * structures;
    }
    return static_cast<int>(std::min(cost / (4.0 * row_ptr_[size_.num_rows] + 1), 1e9));
  }

  enum class Cuts { none, added, no_room };

  // Adds rows for the sets of words that lack more than `tolerance` at mu (see TreeCuts). mu(j):
  // the marginal of variable j of the Problem.
  template <class Marginal>
  Cuts add_violated(const Marginal& mu, double tolerance) {
    const Structured& s = source_->structured;
    Cuts result = Cuts::none;
    for (int f = 0; f < s.count && result != Cuts::no_room; ++f) {
      if (!is_tree(s, f)) continue;
      const Span<const std::int32_t> vars = s.vars(f);
      const int n = words_of(s, f);
      find_present(f);
      cuts_.resize(n);
      const Span<const std::uint8_t> found = cuts_.member.first(n);
      cuts_.find(
          [&](int m, const auto& visit) {
            for (int h = 0; h < n; ++h) visit(h, double(mu(vars[m * n + h])));
          },
          [&](int m) { return present_[m] != 0; }, tolerance, [&] { return is_known(f, found); },
          [&] {
            result = add_cut(f, found) ? Cuts::added : Cuts::no_room;
            return result == Cuts::added;
          });
    }
    // What the rows of words alone say is no longer a good start.
    if (result == Cuts::added) fill(block_isolated_.first(size_.num_blocks), std::uint8_t(0));
    return result;
  }

 private:
  // With more structures than these, rows cost less, as measured, docs/math.md (61). Other factors
  // divide the numbers by kMorePasses: they make for more passes, each of which asks the oracle
  // anew.
  static constexpr int kTreeStructures = 64, kMatchings = 16, kMorePasses = 4;

  static bool is_tree(const Structured& s, int f) {
    return s.kind[f] == static_cast<std::int8_t>(OracleKind::tree);
  }
  static bool is_matching(const Structured& s, int f) {
    return s.kind[f] == static_cast<std::int8_t>(OracleKind::matching);
  }
  static int words_of(const Structured& s, int f) { return s.shapes(f)[0]; }
  static bool single_root(const Structured& s, int f) { return s.shapes(f)[1] != 0; }
  static int rows_of(const Structured& s, int f) {
    return is_tree(s, f) ? s.shapes(f)[0] + 1 : s.shapes(f)[0] + s.shapes(f)[1];
  }
  // A set of half the words has a quarter of the entries that all words have.
  static int entries_of_cuts(int vars) { return std::max(4 * vars, std::min(32 * vars, 1 << 20)); }
  static int most_cuts(const Structured& s, int f) {
    return is_tree(s, f) ? 2 * words_of(s, f) + 8 : 0;
  }

  Span<std::uint8_t> cut_members(int c) const {
    return {members_.data + cut_begin_[c], static_cast<int>(cut_begin_[c + 1] - cut_begin_[c])};
  }
  bool is_interior(int r) const { return row_side[r] == static_cast<std::int8_t>(Side::interior); }
  int first_row(int f) const {
    int r = source_->num_rows;
    for (int g = 0; g < f; ++g) r += rows_of(source_->structured, g);
    return r;
  }
  // The row of a matching's first column.
  int first_column(int f) const { return first_row(f) + source_->structured.shapes(f)[0]; }

  bool is_there(std::int32_t j) const { return is_there(j, any_masked_ ? mask_.data : nullptr); }
  bool is_there(std::int32_t j, const std::uint8_t* mask) const {
    return is_present(mask, eta_, j);
  }

  // How many of these variables are not 0 in their sparsemax; 1 if none of them is there.
  static int support(Span<const std::int32_t> vars, const std::uint8_t* mask, const T* eta) {
    const auto there = [&](std::int32_t j) { return mask == nullptr || mask[j] != 0; };
    T level = -std::numeric_limits<T>::infinity();
    for (const std::int32_t j : vars) level = there(j) && eta[j] > level ? eta[j] : level;
    level -= 1;  // nothing below counts
    int before = vars.size + 1;
    for (;;) {
      // Drop what is below the level at which the others sum to 1.
      T sum = 0;
      int count = 0;
      for (const std::int32_t j : vars) {
        const bool above = eta[j] > level && there(j);
        sum += above ? eta[j] : T(0);
        count += above;
      }
      if (count >= before || count <= 1) return std::max(count, 1);  // rounding may bring one back
      before = count;
      level = (sum - 1) / count;
    }
  }

  // A word is there if some arc to it is.
  void find_present(int f) {
    const Structured& s = source_->structured;
    const Span<const std::int32_t> vars = s.vars(f);
    const int n = words_of(s, f);
    for (int m = 0; m < n; ++m) {
      present_[m] = 0;
      for (int h = 0; h < n && !present_[m]; ++h) present_[m] = is_there(vars[m * n + h]);
    }
  }

  bool is_known(int f, Span<const std::uint8_t> member) const {
    for (int c = 0; c < num_cuts_; ++c) {
      if (cut_factor_[c] != f) continue;
      const Span<std::uint8_t> other = cut_members(c);
      if (std::equal(other.begin(), other.end(), member.begin())) return true;
    }
    return false;
  }

  void put(std::int32_t j) {
    const int e = row_ptr_[rows_ + 1]++;
    col_[e] = j;
    coef_[e] = 1;
  }
  void begin_row(bool there, RowKind kind) {
    kind_[rows_] = static_cast<std::int8_t>(there ? kind : RowKind::absent);
    rhs_[rows_] = 1;
    row_ptr_[rows_ + 1] = row_ptr_[rows_];
  }
  void end_block(bool isolated) {
    ++rows_;
    block_kind_[blocks_] = static_cast<std::int8_t>(BlockKind::row);
    block_isolated_[blocks_] = isolated;
    block_ptr_[++blocks_] = rows_;
  }

  // One head per word; one word at the root, if asked for. Rows of words share no variable: they
  // are marked so, which gives the solver a good start, or the solution.
  void add_tree(int f) {
    const Structured& s = source_->structured;
    const Span<const std::int32_t> vars = s.vars(f);
    const int n = words_of(s, f);
    find_present(f);
    bool any = false;
    for (int m = 0; m < n; ++m) {
      begin_row(present_[m] != 0, RowKind::equality);
      for (int h = 0; h < n; ++h) {
        if (present_[m] && !present_[h]) take_out(vars[m * n + h]);  // it is no head, then
        put(vars[m * n + h]);
      }
      any |= present_[m] != 0;
      end_block(true);
    }
    begin_row(any && single_root(s, f), RowKind::equality);
    for (int m = 0; m < n; ++m) put(vars[m * n + m]);
    end_block(false);
  }

  void take_out(std::int32_t j) {
    if (!is_there(j)) return;
    if (!any_masked_) fill(mask_, std::uint8_t(1));
    any_masked_ = left_out_ = true;
    mask_[j] = 0;
  }

  // Whether a factor of the graph would be absent because arcs were taken out. mask: the user's.
  bool hides_factor(const std::uint8_t* mask) const {
    const Problem<T>& p = *source_;
    const auto hidden = [&](const std::int32_t* begin, const std::int32_t* end) {
      return begin != end && std::none_of(begin, end, [&](int j) { return is_there(j); }) &&
             std::any_of(begin, end, [&](int j) { return is_there(j, mask); });
    };
    for (int f = 0; f < p.num_blocks; ++f) {
      if (hidden(p.col + p.row_ptr[p.block_ptr[f]], p.col + p.row_ptr[p.block_ptr[f + 1]])) {
        return true;
      }
    }
    for (int q = 0; q < p.num_pairs; ++q) {
      if (hidden(p.pair_var + 2 * q, p.pair_var + 2 * q + 2)) return true;
    }
    return false;
  }

  void add_matching(int f) {
    const Structured& s = source_->structured;
    const Span<const std::int32_t> vars = s.vars(f);
    const int rows = s.shapes(f)[0], cols = s.shapes(f)[1];
    for (int a = 0; a < rows; ++a) {
      bool there = false;
      for (int b = 0; b < cols && !there; ++b) there = is_there(vars[a * cols + b]);
      begin_row(there, RowKind::equality);
      for (int b = 0; b < cols; ++b) put(vars[a * cols + b]);
      end_block(true);
    }
    for (int b = 0; b < cols; ++b) {
      begin_row(true, RowKind::inequality);
      for (int a = 0; a < rows; ++a) put(vars[a * cols + b]);
      end_block(false);
    }
  }

  const Problem<T>* source_ = nullptr;
  Span<std::uint8_t> mask_;  // (n,) the instance's, less arcs from absent words
  bool any_masked_ = false;
  bool left_out_ = false;  // whether there are such arcs
  const T* eta_ = nullptr;
  Problem<T> size_, made_;
  int rows_ = 0, blocks_ = 0, first_cut_ = 0, num_cuts_ = 0, most_cuts_ = 0;
  Span<std::int32_t> row_ptr_, col_, block_ptr_;
  Span<T> coef_, rhs_;
  Span<std::int8_t> kind_, block_kind_;
  Span<std::uint8_t> block_isolated_;
  Span<std::int32_t> cut_factor_;  // (cuts,) the tree of each,
  Span<std::int64_t> cut_begin_;   // and where its members begin
  Span<std::uint8_t> members_, present_;
  TreeCuts cuts_;
};

}  // namespace factormax
