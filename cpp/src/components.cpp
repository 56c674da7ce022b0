#include "factormax/components.hpp"

#include <algorithm>
#include <functional>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace factormax {

namespace {

// Which variables are connected: the first one of each set stands for it.
class Sets {
 public:
  explicit Sets(int count) : parent_(static_cast<std::size_t>(count)) {
    for (int j = 0; j < count; ++j) parent_[j] = j;
  }

  std::int32_t find(std::int32_t j) {
    while (parent_[j] != j) j = parent_[j] = parent_[parent_[j]];
    return j;
  }
  void join(const std::int32_t* begin, const std::int32_t* end) {
    if (begin == end) return;
    std::int32_t root = find(*begin);
    for (const std::int32_t* j = begin + 1; j != end; ++j) {
      const std::int32_t other = find(*j);
      parent_[std::max(root, other)] = std::min(root, other);
      root = std::min(root, other);
    }
  }

 private:
  std::vector<std::int32_t> parent_;
};

// Sorts 0, ..., count - 1 by their component; those of component c then begin at ptr[c].
struct Sorted {
  std::vector<std::int32_t> ptr, item;

  template <class ComponentOf>
  Sorted(int count, int components, const ComponentOf& component_of)
      : ptr(static_cast<std::size_t>(components) + 1, 0), item(static_cast<std::size_t>(count)) {
    for (int k = 0; k < count; ++k) ++ptr[component_of(k) + 1];
    for (int c = 0; c < components; ++c) ptr[c + 1] += ptr[c];
    std::vector<std::int32_t> next(ptr.begin(), ptr.end() - 1);
    for (int k = 0; k < count; ++k) item[next[component_of(k)]++] = k;
  }

  Span<const std::int32_t> of(int c) const { return {item.data() + ptr[c], ptr[c + 1] - ptr[c]}; }
};

}  // namespace

void Components::Arrays::clear() {
  num_vars = num_links = 0;
  coef.clear();
  for (auto* list : {&col, &pair_var, &var, &shape}) list->clear();
  for (auto* list : {&row_ptr, &block_ptr, &var_ptr, &shape_ptr, &score_ptr}) list->assign(1, 0);
  for (auto* list : {&kind, &block_kind, &oracle_kind}) list->clear();
  for (auto* list : {&pair_negated, &block_isolated, &linked}) list->clear();
}

std::uint64_t Components::Arrays::hash() const {
  std::uint64_t h = static_cast<std::uint64_t>(num_vars);
  const auto add = [&](std::uint64_t word) { h = (h ^ word) * 0x100000001b3u + (h >> 47); };
  for (const auto* list : {&row_ptr, &col, &block_ptr, &pair_var, &var, &shape, &score_ptr}) {
    add(list->size());
    for (const std::int32_t word : *list) add(static_cast<std::uint32_t>(word));
  }
  for (const double a : coef) add(std::hash<double>()(a));
  return h;
}

bool Components::Arrays::operator==(const Arrays& other) const {
  const auto tied = [](const Arrays& a) {
    return std::tie(a.num_vars, a.num_links, a.row_ptr, a.col, a.block_ptr, a.pair_var, a.kind,
                    a.block_kind, a.oracle_kind, a.pair_negated, a.block_isolated, a.linked,
                    a.var_ptr, a.var, a.shape_ptr, a.shape, a.score_ptr, a.coef);
  };
  return tied(*this) == tied(other);
}

Layout Components::Arrays::layout() const {
  Layout p;
  p.num_vars = num_vars;
  p.num_rows = static_cast<int>(kind.size());
  p.num_entries = static_cast<int>(col.size());
  p.num_pairs = static_cast<int>(pair_var.size() / 2);
  p.num_blocks = p.num_factors = static_cast<int>(block_kind.size());
  p.row_ptr = row_ptr.data();
  p.col = col.data();
  p.kind = kind.data();
  p.pair_var = pair_var.data();
  p.pair_negated = pair_negated.data();
  p.block_ptr = block_ptr.data();
  p.block_kind = block_kind.data();
  p.block_isolated = block_isolated.data();
  Structured& s = p.structured;
  s.count = static_cast<int>(oracle_kind.size());
  s.num_links = num_links;
  s.num_scores = score_ptr.back();
  s.kind = oracle_kind.data();
  s.linked = linked.data();
  s.var_ptr = var_ptr.data();
  s.var = var.data();
  s.shape_ptr = shape_ptr.data();
  s.shape = shape.data();
  s.score_ptr = score_ptr.data();
  return p;
}

// About how much there is to do, in variables and entries that are looked at once. What has no
// closed form takes many passes.
std::int64_t Components::Arrays::work() const {
  constexpr int kPasses = 16;
  const bool closed =
      oracle_kind.empty() &&
      std::all_of(block_isolated.begin(), block_isolated.end(), [](int alone) { return alone; });
  const std::size_t size = num_vars + col.size() + pair_var.size() + var.size() + score_ptr.back();
  return static_cast<std::int64_t>(size) * (closed ? 1 : kPasses);
}

class Components::Finder {
 public:
  Finder(const Layout& whole, const double* coef, Components& made)
      : p_(whole), s_(whole.structured), coef_(coef), made_(made), sets_(whole.num_vars) {}

  // Labels the components; returns whether there are several.
  bool label() {
    std::vector<std::uint8_t> in_factor(static_cast<std::size_t>(p_.num_vars), 0);
    bool empty = false;  // whether some factor has no variable
    const auto join = [&](const std::int32_t* begin, const std::int32_t* end) {
      for (const std::int32_t* j = begin; j != end; ++j) in_factor[*j] = 1;
      empty = empty || begin == end;
      sets_.join(begin, end);
    };
    for (int f = 0; f < p_.num_blocks; ++f) join(block_begin(f), block_begin(f + 1));
    for (int q = 0; q < p_.num_pairs; ++q) join(p_.pair_var + 2 * q, p_.pair_var + 2 * q + 2);
    for (int f = 0; f < s_.count; ++f) join(s_.vars(f).begin(), s_.vars(f).end());
    of_var_.resize(static_cast<std::size_t>(p_.num_vars));
    int free = -1;  // component of variables without factors, and factors without variables
    for (int j = 0; j < p_.num_vars; ++j) {
      const std::int32_t root = sets_.find(j);
      if (in_factor[j] == 0) {
        if (free < 0) free = count_++;
        of_var_[j] = free;
      } else {
        of_var_[j] = root == j ? count_++ : of_var_[root];
      }
    }
    if (empty && free < 0) free = count_++;
    free_ = free;
    if (count_ > 1) gather_closed();
    return count_ > 1;
  }

  void lay_out() {
    const auto of_block = [&](int f) { return of(block_begin(f), block_begin(f + 1)); };
    const auto of_factor = [&](int f) { return of(s_.vars(f).begin(), s_.vars(f).end()); };
    const Sorted vars(p_.num_vars, count_, [&](int j) { return of_var_[j]; });
    const Sorted blocks(p_.num_blocks, count_, of_block);
    const Sorted pairs(p_.num_pairs, count_, [&](int q) { return of_var_[p_.pair_var[2 * q]]; });
    const Sorted factors(s_.count, count_, of_factor);
    std::vector<std::int32_t> link(1, p_.num_rows + p_.num_pairs);  // where a factor's links begin
    for (int f = 0; f < s_.count; ++f) {
      link.push_back(link.back() + (s_.linked[f] != 0 ? s_.vars(f).size : 0));
    }
    place_.resize(static_cast<std::size_t>(p_.num_vars));
    made_.all_.resize(static_cast<std::size_t>(count_));
    made_.var_ = vars.item;
    made_.factor_ = factors.item;
    made_.dual_.reserve(static_cast<std::size_t>(p_.num_dual()));
    made_.score_.reserve(static_cast<std::size_t>(p_.num_scores()));
    for (int c = 0; c < count_; ++c) {
      const Span<const std::int32_t> own = vars.of(c);
      for (int k = 0; k < own.size; ++k) place_[own[k]] = k;
      const std::size_t dual = made_.dual_.size(), score = made_.score_.size();
      now_.clear();
      now_.num_vars = own.size;
      for (const std::int32_t f : blocks.of(c)) add_block(f);
      for (const std::int32_t q : pairs.of(c)) add_pair(q);
      for (const std::int32_t f : factors.of(c)) add_factor(f, link[f], link[f + 1]);
      Component& component = made_.all_[c];
      component.kind = kind_of_this();
      component.vars = indices(made_.var_, vars.ptr[c], vars.ptr[c + 1]);
      component.dual = indices(made_.dual_, dual, made_.dual_.size());
      component.scores = indices(made_.score_, score, made_.score_.size());
      component.factors = indices(made_.factor_, factors.ptr[c], factors.ptr[c + 1]);
    }
  }

 private:
  // What has a closed form is solved in one pass, alone or among others. So small ones go together:
  // a solve for each would cost more than they do.
  void gather_closed() {
    std::vector<std::int64_t> work(static_cast<std::size_t>(count_), 0);
    std::vector<std::uint8_t> closed(static_cast<std::size_t>(count_), 1);
    for (const std::int32_t c : of_var_) ++work[c];
    for (int f = 0; f < p_.num_blocks; ++f) {
      const int c = of(block_begin(f), block_begin(f + 1));
      work[c] += block_begin(f + 1) - block_begin(f);
      closed[c] &= p_.block_isolated[f];
    }
    for (int q = 0; q < p_.num_pairs; ++q) {
      const int c = of_var_[p_.pair_var[2 * q]];
      work[c] += 2;
      closed[c] &= p_.block_isolated[p_.num_blocks + q];
    }
    for (int f = 0; f < s_.count; ++f) closed[of(s_.vars(f).begin(), s_.vars(f).end())] = 0;
    std::vector<std::int32_t> small;  // like ones together
    for (int c = 0; c < count_; ++c) {
      if (closed[c] != 0 && work[c] < kTogether) small.push_back(c);
    }
    std::stable_sort(small.begin(), small.end(), [&](int a, int b) { return work[a] < work[b]; });
    std::vector<std::int32_t> label(static_cast<std::size_t>(count_), -1);
    int first = -1;
    std::int64_t sum = 0;
    for (const std::int32_t c : small) {
      if (first < 0 || sum + work[c] > kTogether) {
        first = c;
        sum = 0;
      }
      label[c] = first;
      sum += work[c];
    }
    std::vector<std::int32_t> number(static_cast<std::size_t>(count_), -1);
    int count = 0;
    for (int c = 0; c < count_; ++c) {
      std::int32_t& group = number[label[c] < 0 ? c : label[c]];
      if (group < 0) group = count++;
      label[c] = group;
    }
    for (std::int32_t& c : of_var_) c = label[c];
    if (free_ >= 0) free_ = label[free_];
    count_ = count;
  }

  // The component of a factor with these variables.
  int of(const std::int32_t* begin, const std::int32_t* end) const {
    return begin == end ? free_ : of_var_[*begin];
  }

  static constexpr std::int64_t kTogether = 2048;

  const std::int32_t* block_begin(int f) const { return p_.col + p_.row_ptr[p_.block_ptr[f]]; }

  void add_block(int f) {
    if (coef_ != nullptr) {
      const std::int64_t begin = block_begin(f) - p_.col, end = block_begin(f + 1) - p_.col;
      now_.coef.insert(now_.coef.end(), coef_ + begin, coef_ + end);
    }
    for (int r = p_.block_ptr[f]; r < p_.block_ptr[f + 1]; ++r) {
      for (int k = p_.row_ptr[r]; k < p_.row_ptr[r + 1]; ++k) now_.col.push_back(place_[p_.col[k]]);
      now_.row_ptr.push_back(static_cast<std::int32_t>(now_.col.size()));
      now_.kind.push_back(p_.kind[r]);
      made_.dual_.push_back(r);
    }
    now_.block_ptr.push_back(static_cast<std::int32_t>(now_.kind.size()));
    now_.block_kind.push_back(p_.block_kind[f]);
    now_.block_isolated.push_back(p_.block_isolated[f]);
  }

  void add_pair(int q) {
    for (int end = 0; end < 2; ++end) {
      now_.pair_var.push_back(place_[p_.pair_var[2 * q + end]]);
      now_.pair_negated.push_back(p_.pair_negated[2 * q + end]);
    }
    now_.block_isolated.push_back(p_.block_isolated[p_.num_blocks + q]);
    made_.dual_.push_back(p_.num_rows + q);
    made_.score_.push_back(q);
  }

  void add_factor(int f, int first_link, int last_link) {
    for (const std::int32_t j : s_.vars(f)) now_.var.push_back(place_[j]);
    now_.var_ptr.push_back(static_cast<std::int32_t>(now_.var.size()));
    for (const std::int32_t size : s_.shapes(f)) now_.shape.push_back(size);
    now_.shape_ptr.push_back(static_cast<std::int32_t>(now_.shape.size()));
    now_.score_ptr.push_back(now_.score_ptr.back() + s_.scores(f));
    now_.oracle_kind.push_back(s_.kind[f]);
    now_.linked.push_back(s_.linked[f]);
    now_.num_links += last_link - first_link;
    for (int r = first_link; r < last_link; ++r) made_.dual_.push_back(r);
    for (int k = s_.score_ptr[f]; k < s_.score_ptr[f + 1]; ++k) {
      made_.score_.push_back(p_.num_pairs + k);
    }
  }

  int kind_of_this() {
    const std::uint64_t hash = now_.hash();
    const auto [begin, end] = known_.equal_range(hash);
    for (auto known = begin; known != end; ++known) {
      if (made_.kinds_[known->second]->arrays == now_) return known->second;
    }
    auto kind = std::make_unique<Kind>();
    kind->arrays = now_;
    kind->layout = kind->arrays.layout();
    kind->work = now_.work();
    made_.kinds_.push_back(std::move(kind));
    known_.emplace(hash, made_.num_kinds() - 1);
    return made_.num_kinds() - 1;
  }

  // The lists have their final size from the start: they do not move.
  static Indices indices(const std::vector<std::int32_t>& list, std::size_t begin,
                         std::size_t end) {
    return Indices::of(list.data() + begin, static_cast<int>(end - begin));
  }

  const Layout& p_;
  const Structured& s_;
  const double* coef_;
  Components& made_;
  Sets sets_;
  int count_ = 0, free_ = -1;
  std::vector<std::int32_t> of_var_;  // (n,) component
  std::vector<std::int32_t> place_;   // (n,) number in its component
  Arrays now_;
  std::unordered_multimap<std::uint64_t, int> known_;
};

std::unique_ptr<const Components> Components::of(const Layout& whole, const double* coef) {
  auto made = std::make_unique<Components>();
  Finder finder(whole, coef, *made);
  if (!finder.label()) return nullptr;
  finder.lay_out();
  made->cut_into_chunks();
  return made;
}

void Components::cut_into_chunks() {
  constexpr std::int64_t kGrain = 4096;  // a few microseconds: less is not worth another thread
  const auto key = [&](const Component& c) {
    return std::tuple(-kinds_[c.kind]->work, c.kind);  // like ones stay in their order
  };
  std::stable_sort(all_.begin(), all_.end(),
                   [&](const Component& a, const Component& b) { return key(a) < key(b); });
  of_factor_.resize(factor_.size());
  chunk_ptr_.push_back(0);
  std::int64_t work = kGrain;
  for (int c = 0; c < count(); ++c) {
    Component& own = all_[c];
    if (own.factors.count > 0) own.structures = num_structured_++;
    for (int k = 0; k < own.factors.count; ++k) of_factor_[own.factors.index[k]] = c;
    const bool full = work >= kGrain;
    if (full && c > 0) chunk_ptr_.push_back(static_cast<int>(runs_.size()));
    if (full) work = 0;
    if (full || runs_.back().kind != own.kind) runs_.push_back({own.kind, c, c});
    ++runs_.back().last;
    work += kinds_[own.kind]->work;
  }
  chunk_ptr_.push_back(static_cast<int>(runs_.size()));
}

}  // namespace factormax
