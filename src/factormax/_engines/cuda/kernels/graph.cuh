// What a kernel is given, the memory of a team, and products with the rows of the graph.
//
// Rows 0 .. hard - 1 are constraints, the others are pairs, docs/math.md (9)-(11). A product is a
// gather from lists that are laid out for the team: in each round every group of lanes has a row
// (or a variable) of its own, and every thread reads one pack of entries after the other. Entries
// that fill up a pack stand for variable n or row m, whose values are 0.
#pragma once

#include "team.cuh"

namespace factormax {

// In the order of `_engines/cuda/plan.py`, which reads this text.
template <class V>
struct Args {
  using T = typename V::T;    // type of the computation
  using Io = typename V::Io;  // type of what comes in and goes out

  // The model. Entries of rows in packs: variable * sizeof(T) + negated. Entries of variables: row
  // * sizeof(T) + 2 second end of a pair + negated; the first end of a pair has the sign it has
  // where the pair attracts.
  const int* row_first;  // (rounds + 1,) packs
  const u32* row_code;   // packs
  const int* row_place;  // places in coef, or null if all are 1 or -1
  const int* var_first;  // the same by variables
  const u32* var_code;
  const int* var_place;
  const int* row_ptr;  // (hard + 1,) the entries in one list per row, 2 variable + negated,
  const int* row_entry;
  const int* var_ptr;  // (n + 1,) and per variable, 4 row + 2 second end + negated
  const int* var_entry;
  const int* var_at;    // places in coef, -1 for pairs
  const int* pair;      // (pairs, 2), 2 variable + negated
  const i8* kind;       // (hard,) RowKind
  const int* block;     // (hard, 2) the first row of its factor, and one past the last
  const u8* flags;      // (hard,) see RowFlag
  const u32* corner;    // entries of a lower triangle, row by row: 65536 row + column
  const int* isolated;  // (num_isolated,) rows that share no variable with another
  const T* scale;       // (hard,) 1 / norm, 0 if the row says nothing; null if instances differ

  // The instances.
  const T* coef;
  const T* rhs;
  const Io* eta_u;
  const Io* eta_v;
  const u8* mask;
  // If the instances share some factor scores, eta_v holds only the others.
  const Io* shared;        // (1, S)
  const double* heat;      // (batch,) what divides the shared ones of each instance, or null
  const int* score_place;  // kListed: a column of eta_v, or ~ a column of shared, for each score
  const Io* warm;
  Io* mu;
  Io* mu_v;
  Io* tau;
  i8* var_side;
  i8* row_side;
  Io* objective;
  double* residual;
  int* iterations;
  int* status;
  int* unsolved;  // becomes 1 if an instance is not solved; may be null
  T* work;        // rows that do not fit into shared memory

  // The gradient.
  const Io* grad_mu;
  const Io* grad_mu_v;
  Io* grad_eta_u;
  Io* grad_eta_v;

  i64 coef_stride;
  i64 rhs_stride;
  i64 eta_v_stride;
  i64 mask_stride;
  i64 work_stride;
  double tol;
  double retry_above;  // for the gradient: larger residuals are not good enough
  int batch;
  int retry;  // whether to do only what an earlier launch could not
  int n;
  int hard;
  int pairs;
  int padded_rows;  // length of a row array
  int num_isolated;
  int all_isolated;
  int max_iter;
  int most_active;  // rows that fit into a dense system
  int lead;         // the first rows, which share no variable with each other
  int degree;       // the most rows that a variable is in
  int longest;      // length of the longest row
  int zeros;        // whether to look for variables that are certain to be 0
  int first_own;    // kOneRun: the scores that are not shared,
  int num_own;      // which are side by side
  // Where things are in the shared memory of a team, in bytes.
  int team_bytes;
  int at_sums;
  int at_eta;
  int at_mu;
  int at_v;
  int at_t;
  int at_found;
  int at_rows;
  int at_b;
  int at_inverse;
  int at_matrix;
  int at_place;
  int at_active;
  int at_zero;

  // Structured factors, see hubs.cuh.
  const int* hub;           // (num_hubs, 11), see Hub
  const int* hub_shape;     // shapes of all hubs
  const int* hub_var;       // (hub_vars,) their variables, one hub after the other,
  const u16* hub_slot;      // and in which slot of a structure they can be
  const int* hub_at;        // (n + team,) the place of a variable there, or -1
  const double* hub_param;  // (structured factors,)
  u16* hub_saved;           // structures, for the gradient
  int* calls;               // oracle calls
  char* hub_work;           // what does not fit into shared memory
  i64 hub_param_stride;
  i64 hub_saved_stride;
  i64 hub_work_stride;
  int num_hubs;
  int hub_vars;
  int hub_scores;
  int at_hubs;
  int at_hub_more;
  int hub_x;  // where things are in the memory of the hubs, in bytes
  int hub_v;
  int hub_rest;
  int hub_score;
  int hub_scratch;

  // Trees, see cuts.cuh.
  const int* tree;      // (num_trees, 2) the first of its arcs, and its words
  const int* tree_var;  // the variables of arcs, (words, words) each: word, and head
  const int* arc_of;    // (n + team,) 65536 tree + 256 word + head, or -1
  int* cuts_saved;      // for the gradient
  i64 cuts_saved_stride;
  int num_trees;
  int most_words;
  int most_cuts;
  int most_arcs;   // arcs that a search for cuts has room for
  int cut_words;   // numbers of 32 bits for a set of words
  int first_cut;   // row of the first cut
  int model_rows;  // those of the graph itself, which come first
  int unit_at;     // where a coefficient is 1,
  int minus_at;    // and where it is -1
  int at_cuts;
  int at_cut_lists;
  int at_cut_scratch;
};

// A tree: which variables are its arcs.
struct Tree {
  const int* var;
  int words;

  template <class V>
  FM_DEVICE Tree(const Args<V>& a, int f)
      : var(a.tree_var + a.tree[2 * f]), words(a.tree[2 * f + 1]) {}
  FM_DEVICE int arc(int word, int head) const { return var[word * words + head]; }
};

enum RowKind : i8 { kAbsent = 0, kInequality = 1, kEquality = 2 };
enum Side : i8 { kLower = -1, kInterior = 0, kUpper = 1, kNoSide = 2, kTied = 3 };
enum RowFlag : u8 {
  kOfFactor = 1,   // absent where all variables of its factor are masked
  kBandLower = 2,  // the first of two rows of the same entries,
  kBandUpper = 4,  // and the second
  kUneven = 8,     // its coefficients differ in size
};

template <class T>
struct Constants {
  static constexpr bool kDouble = sizeof(T) == 8;
  static constexpr T kEps = kDouble ? T(2.220446049250313e-16) : T(1.1920928955078125e-07);
  static constexpr T kRoot2 = T(1.41421356237309504880), kHalfRoot2 = T(0.70710678118654752440);
};

template <class T>
FM_DEVICE T infinity() {
#ifdef __CUDA_ARCH__
  return T(__int_as_float(0x7f800000));
#else
  return T(__builtin_huge_val());
#endif
}
FM_DEVICE float least(float a, float b) { return fminf(a, b); }
FM_DEVICE float most(float a, float b) { return fmaxf(a, b); }
FM_DEVICE double least(double a, double b) { return fmin(a, b); }
FM_DEVICE double most(double a, double b) { return fmax(a, b); }
FM_DEVICE int least(int a, int b) { return a < b ? a : b; }
FM_DEVICE float magnitude(float value) { return fabsf(value); }
FM_DEVICE double magnitude(double value) { return fabs(value); }
template <class T>
FM_DEVICE T clip(T value, T lo, T hi) {
  return value < lo ? lo : (value > hi ? hi : value);
}
FM_DEVICE double to_box(double value) { return fmin(fmax(value, 0.0), 1.0); }
FM_DEVICE float to_box(float value) {
#ifdef __CUDA_ARCH__
  return __saturatef(value);  // free, as part of the operation before
#else
  return fminf(fmaxf(value, 0.0f), 1.0f);
#endif
}
template <class T>
FM_DEVICE bool inside_box(T mu) {
  return mu > 0 && mu < 1;
}

template <int WIDTH>
struct alignas(4 * WIDTH) Pack {
  u32 at[WIDTH];
};

// An array over all rows. In shared memory the arrays are interleaved, so that one address serves
// all of them.
template <class V>
struct RowArray {
  using T = typename V::T;
  T* first;

  FM_DEVICE T& operator[](int r) const { return first[r * (V::kRowsShared ? V::kRowArrays : 1)]; }
};

// Where the factor scores are: all in one array, those of each instance side by side among shared
// ones, or as a list says.
enum Mixture : int { kNotMixed, kOneRun, kListed };

// The factor scores of an instance.
template <class V>
struct FactorScores {
  using Io = typename V::Io;

  const Args<V>& a;
  const Io* own;
  Io heat;

  FM_DEVICE FactorScores(const Args<V>& args, i64 i)
      : a(args),
        own(args.eta_v + i * args.eta_v_stride),
        heat(V::kMixed != kNotMixed && args.heat != nullptr ? Io(args.heat[i]) : Io(1)) {}

  FM_DEVICE Io operator[](int k) const {
    if constexpr (V::kMixed == kNotMixed) return own[k];
    bool is_own;
    int at;  // the column
    if constexpr (V::kMixed == kOneRun) {
      is_own = u32(k - a.first_own) < u32(a.num_own);
      at = is_own ? k - a.first_own : (k < a.first_own ? k : k - a.num_own);
    } else {
      at = a.score_place[k];
      is_own = at >= 0;
      at = is_own ? at : ~at;
    }
    const Io found = *((is_own ? own : a.shared) + at);
    return is_own || heat == Io(1) ? found : found / heat;
  }
};

template <class V>
struct Graph {
  using T = typename V::T;
  using Io = typename V::Io;

  const Args<V>& a;
  Team<V::kTeam> team;
  char* base;
  T* rows;
  i64 instance;
  const T* coef;
  FactorScores<V> score;

  FM_DEVICE Graph(const Args<V>& args, Team<V::kTeam> members, char* memory, i64 i)
      : a(args),
        team(members),
        base(memory),
        rows(V::kRowsShared ? reinterpret_cast<T*>(memory + args.at_rows)
                            : args.work + i * args.work_stride),
        instance(i),
        coef(args.coef + i * args.coef_stride),
        score(args, i) {}

  FM_DEVICE int num_rows() const { return a.hard + a.pairs; }
  FM_DEVICE int num_scores() const { return V::kHubs ? a.pairs + a.hub_scores : a.pairs; }
  FM_DEVICE T* sums() const { return reinterpret_cast<T*>(base + a.at_sums); }
  FM_DEVICE T* eta() const { return reinterpret_cast<T*>(base + a.at_eta); }
  FM_DEVICE T* mu() const { return reinterpret_cast<T*>(base + a.at_mu); }
  FM_DEVICE T* v() const { return reinterpret_cast<T*>(base + a.at_v); }
  FM_DEVICE T* t() const { return reinterpret_cast<T*>(base + a.at_t); }
  FM_DEVICE T* found() const { return reinterpret_cast<T*>(base + a.at_found); }
  FM_DEVICE T* b() const { return reinterpret_cast<T*>(base + a.at_b); }
  FM_DEVICE T* inverse() const { return reinterpret_cast<T*>(base + a.at_inverse); }
  FM_DEVICE T* matrix() const { return reinterpret_cast<T*>(base + a.at_matrix); }
  FM_DEVICE int* place() const { return reinterpret_cast<int*>(base + a.at_place); }
  FM_DEVICE int* active() const { return reinterpret_cast<int*>(base + a.at_active); }
  FM_DEVICE u8* zero() const { return reinterpret_cast<u8*>(base + a.at_zero); }
  // The memory of hubs, and what their systems and faces take.
  FM_DEVICE char* hubs() const {
    return V::kHubsShared ? base + a.at_hubs
                          : a.hub_work + instance * a.hub_work_stride + a.at_hubs;
  }
  FM_DEVICE T* hub_more() const {
    char* own = V::kHubMoreShared ? base : a.hub_work + instance * a.hub_work_stride;
    return reinterpret_cast<T*>(own + a.at_hub_more);
  }
  FM_DEVICE T* hub_x() const { return reinterpret_cast<T*>(hubs() + a.hub_x); }
  FM_DEVICE T* hub_v() const { return reinterpret_cast<T*>(hubs() + a.hub_v); }
  FM_DEVICE T* hub_rest() const { return reinterpret_cast<T*>(hubs() + a.hub_rest); }
  FM_DEVICE T* hub_scores() const { return reinterpret_cast<T*>(hubs() + a.hub_score); }
  FM_DEVICE char* hub_scratch() const { return hubs() + a.hub_scratch; }
  // The cuts at hand: their number, the tree and the form of each, how many words each has, and
  // which; after those, in the same list, the other words.
  FM_DEVICE int* cut_count() const { return reinterpret_cast<int*>(base + a.at_cuts); }
  FM_DEVICE int* cut_form() const { return cut_count() + 1; }  // 2 tree + whether by_outside
  FM_DEVICE u32* cut_bits(int c) const {
    return reinterpret_cast<u32*>(cut_form() + a.most_cuts) + c * a.cut_words;
  }
  FM_DEVICE Tree tree_of_cut(int c) const { return Tree(a, cut_form()[c] >> 1); }
  // As there is one head per word, "at least one head outside" is "fewer than all inside": the row
  // is the one with fewer variables, with coefficients of -1 outside and 1 inside.
  FM_DEVICE bool by_outside(int c) const { return (cut_form()[c] & 1) != 0; }
  FM_DEVICE T cut_coef(int c) const { return by_outside(c) ? T(-1) : T(1); }
  FM_DEVICE int* cut_size() const { return reinterpret_cast<int*>(base + a.at_cut_lists); }
  FM_DEVICE u8* cut_list(int c) const {
    return reinterpret_cast<u8*>(cut_size() + a.most_cuts) + c * a.most_words;
  }
  FM_DEVICE bool in_cut(int c, int word) const {
    return (cut_bits(c)[word / 32] >> (word % 32) & 1) != 0;
  }
  // Whether a cut has a variable in its row. A word that is its own head has the root's.
  FM_DEVICE bool cuts(int c, int j) const {
    const int arc = a.arc_of[j], word = arc >> 8 & 255, head = arc & 255, form = cut_form()[c];
    if (arc < 0 || form >> 1 != arc >> 16 || !in_cut(c, word)) return false;
    return (word != head && in_cut(c, head)) == ((form & 1) == 0);
  }
  // Calls visit(j) for the variables in the row of a cut, those of some of its words.
  template <class Visit>
  FM_DEVICE void each_of_cut(int c, Visit visit, int start = 0, int stride = 1) const {
    const Tree own = tree_of_cut(c);
    const u8* list = cut_list(c);
    const bool outside = by_outside(c);
    const int size = cut_size()[c], first = outside ? size : 0, end = outside ? own.words : size;
#pragma unroll 1
    for (int i = start; i < size; i += stride) {
      const int word = list[i];
#pragma unroll 1
      for (int k = first; k < end + outside; ++k) {
        const int head = k < end ? list[k] : word;
        if (outside || head != word) visit(own.arc(word, head));
      }
    }
  }
  FM_DEVICE RowArray<V> row_array(int k) const {
    return {rows + k * (V::kRowsShared ? 1 : a.padded_rows)};
  }

  FM_DEVICE bool is_soft(int r) const { return V::kPairs && r >= a.hard; }
  FM_DEVICE bool present(int j) const { return eta()[j] > -infinity<T>(); }

  template <class Visit>
  FM_DEVICE void for_rows(Visit visit) const {
#pragma unroll 1
    for (int r = team.rank; r < num_rows(); r += V::kTeam) visit(r);
  }
  template <class Visit>
  FM_DEVICE void for_vars(Visit visit) const {
#pragma unroll 1
    for (int j = team.rank; j < a.n; j += V::kTeam) visit(j);
  }

  // Calls visit(j, c) for the variables of a row and their coefficients, or for the share of one of
  // several threads.
  template <class Visit>
  FM_DEVICE void each_entry(int r, Visit visit, int start = 0, int stride = 1) const {
    if (is_soft(r)) {
      if (start > 0) return;
      pair_row(r - a.hard, Add(), [&](u32 code, T c) {
        visit(index_of(code), c);
        return T(0);
      });
      return;
    }
    if constexpr (V::kTrees) {
      if (r >= a.first_cut) {
        const int c = r - a.first_cut;
        if (c < *cut_count()) {
          const T coef = cut_coef(c);
          each_of_cut(c, [&](int j) { visit(j, coef); }, start, stride);
        }
        return;
      }
    }
#pragma unroll 1
    for (int k = a.row_ptr[r] + start; k < a.row_ptr[r + 1]; k += stride) {
      visit(a.row_entry[k] >> 1, row_coef(u32(a.row_entry[k]), k));
    }
  }

  template <class Visit>
  FM_DEVICE void for_hard_rows(Visit visit) const {
#pragma unroll 1
    for (int r = team.rank; r < a.hard; r += V::kTeam) visit(r);
  }
  template <class Visit>
  FM_DEVICE void for_pairs(Visit visit) const {
#pragma unroll 1
    for (int p = team.rank; V::kPairs && p < a.pairs; p += V::kTeam) visit(p);
  }

  // Sets what entries that stand for nothing point to, and the variables that fill up a round.
  FM_DEVICE void set_dummies() const {
    const int j = a.n + team.rank;
    eta()[j] = -infinity<T>();
    mu()[j] = v()[j] = 0;
    if (team.rank == 0) t()[num_rows()] = 0;
  }

  // The value that an entry points to, and its index.
  FM_DEVICE static T value_at(const T* array, u32 code) {
    const u32 offset = V::kCoefs == 1 || V::kPairs ? code & ~3u : code;
    return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(array) + offset);
  }
  FM_DEVICE static int index_of(u32 code) { return int(code / sizeof(T)); }
  FM_DEVICE static bool is_negated(u32 code) { return (code & 1) != 0; }
  FM_DEVICE static bool is_second(u32 code) { return (code & 2) != 0; }

  // Calls take(j, combination of term(code, place) over the rows of variable j). It is also called
  // for the dummies after the last variable, for a branch would cost more.
  template <int UNROLL = 1, class Value, class Combine, class Term, class Take>
  FM_DEVICE void by_variable(Value zero, Combine combine, Term term, Take take) const {
    if constexpr (V::kTrees) {
      visit<V::kVarLanes, V::kVarWidth, V::kVarPacks, UNROLL>(
          a.var_first, a.var_code, a.var_place, a.n + 1, zero, combine, term,
          [&](int j, Value total) {
#pragma unroll 1
            for (int c = 0; a.arc_of[j] >= 0 && c < *cut_count(); ++c) {
              if (!cuts(c, j)) continue;
              const u32 code = u32(a.first_cut + c) * u32(sizeof(T)) + cut_sign(c);
              total = combine(total, term(code, cut_place(c)));
            }
            take(j, total);
          });
      return;
    }
    visit<V::kVarLanes, V::kVarWidth, V::kVarPacks, UNROLL>(a.var_first, a.var_code, a.var_place,
                                                            a.n + 1, zero, combine, term, take);
  }
  // Calls take(r, combination of term(code, place) over the variables of row r), for the hard rows.
  template <class Value, class Combine, class Term, class Take>
  FM_DEVICE void by_hard_row(Value zero, Combine combine, Term term, Take take) const {
    visit<V::kRowLanes, V::kRowWidth, V::kRowPacks, 1>(a.row_first, a.row_code, a.row_place,
                                                       listed(), zero, combine, term,
                                                       [&](int r, Value value) {
                                                         if (r < listed()) take(r, value);
                                                       });
    if constexpr (V::kTrees) visit_cuts(zero, combine, term, take);
  }

  // The same for term(code, c) and all rows, with c the coefficient; the owner of r calls take(r,
  // value). Pairs have codes too.
  template <int UNROLL = 1, class Combine, class Term, class Take>
  FM_DEVICE void by_row(Combine combine, Term term, Take take) const {
    T* products = found();
    const auto own = [&](u32 code, int place) { return term(code, row_coef(code, place)); };
    visit<V::kRowLanes, V::kRowWidth, V::kRowPacks, UNROLL>(
        a.row_first, a.row_code, a.row_place, listed(), T(0), combine, own, [&](int r, T value) {
          if (!V::kTrees || r < listed()) products[r] = value;
        });
    if constexpr (V::kTrees) {
      visit_cuts(T(0), combine, own, [&](int r, T value) { products[r] = value; });
    }
    team.sync();
    for_rows(
        [&](int r) { take(r, is_soft(r) ? pair_row(r - a.hard, combine, term) : products[r]); });
    team.sync();
  }

  // Calls take(j, combination of term(r, c) over the rows of variable j), with c the coefficient.
  template <class Combine, class Term, class Take>
  FM_DEVICE void by_column(Combine combine, Term term, Take take) const {
    by_variable(
        T(0), combine,
        [&](u32 code, int place) { return term(index_of(code), var_coef(code, place)); }, take);
  }

  FM_DEVICE T row_coef(u32 code, int place) const {
    if constexpr (V::kCoefs == 2) {
      return place >= 0 ? coef[place] : T(0);
    } else if constexpr (V::kCoefs == 1) {
      return is_negated(code) ? T(-1) : T(1);
    } else {
      return T(1);
    }
  }
  FM_DEVICE T var_coef(u32 code, int place) const {
    return var_coef(index_of(code), is_second(code), is_negated(code), place);
  }
  FM_DEVICE T var_coef(int r, bool second, bool negated, int place) const {
    const T sign = (V::kCoefs > 0 || V::kPairs) && negated ? T(-1) : T(1);
    if (is_soft(r)) {
      return !second && r < num_rows() && score[r - a.hard] < 0 ? -sign : sign;
    }
    if constexpr (V::kCoefs == 2) return place >= 0 ? coef[place] : T(0);
    return sign;
  }

  template <class Combine, class Term>
  FM_DEVICE T pair_row(int p, Combine combine, Term term) const {
    const int first = a.pair[2 * p], second = a.pair[2 * p + 1];
    const T sign1 = first & 1 ? T(-1) : T(1), sign2 = second & 1 ? T(-1) : T(1);
    return combine(term(u32(first >> 1) * u32(sizeof(T)), score[p] >= 0 ? -sign1 : sign1),
                   term(u32(second >> 1) * u32(sizeof(T)), sign2));
  }

 private:
  // A coefficient of a cut, encoded as in the lists: by a bit, or by its place.
  FM_DEVICE u32 cut_sign(int c) const { return u32(V::kCoefs == 1 && by_outside(c)); }
  FM_DEVICE int cut_place(int c) const { return by_outside(c) ? a.minus_at : a.unit_at; }

  // The hard rows that are in lists.
  FM_DEVICE int listed() const { return V::kTrees ? a.first_cut : a.hard; }

  // Like `visit`, for the rows of cuts: one warp per row.
  template <class Value, class Combine, class Term, class Take>
  FM_DEVICE void visit_cuts(Value zero, Combine combine, Term term, Take take) const {
    constexpr int kLanes = V::kTeam < 32 ? V::kTeam : 32, kWarps = V::kTeam / kLanes;
    const int lane = team.rank % kLanes;
#pragma unroll 1
    for (int c = team.rank / kLanes; c < a.most_cuts; c += kWarps) {
      Value total = zero;
      if (c < *cut_count()) {
        const u32 sign = cut_sign(c);
        const int place = cut_place(c);
        each_of_cut(
            c, [&](int j) { total = combine(total, term(u32(j) * u32(sizeof(T)) + sign, place)); },
            lane, kLanes);
        total = over_lanes<kLanes>(total, combine);
      }
      if (lane == 0) take(a.first_cut + c, total);
    }
  }

  template <int LANES, int WIDTH, int PACKS, int UNROLL, class Value, class Combine, class Term,
            class Take>
  FM_DEVICE void visit(const int* first, const u32* code, const int* places, int count, Value zero,
                       Combine combine, Term term, Take take) const {
    using Codes = Pack<WIDTH>;
    constexpr int kGroups = V::kTeam / LANES;
    const Codes* packs = reinterpret_cast<const Codes*>(code);
    const int rounds = (count + kGroups - 1) / kGroups;
#pragma unroll UNROLL
    for (int k = 0; k < rounds; ++k) {
      const int begin = PACKS > 0 ? k * PACKS : first[k];
      const int end = PACKS > 0 ? begin + PACKS : first[k + 1];
      Value total = zero;
#pragma unroll(PACKS > 0 ? PACKS : UNROLL)
      for (int p = begin; p < end; ++p) {
        const int at = p * V::kTeam + team.rank;
        const Codes own = packs[at];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          const int place = V::kCoefs == 2 ? places[at * WIDTH + w] : 0;
          total = combine(total, term(own.at[w], place));
        }
      }
      total = over_lanes<LANES>(total, combine);
      const int item = k * kGroups + team.rank / LANES;
      if (LANES == 1 || team.rank % LANES == 0) take(item, total);
    }
  }
};

}  // namespace factormax
