#include "factormax/components.hpp"

#include <algorithm>
#include <functional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "component_labels.hpp"

namespace factormax {

namespace {

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

// Lays out the components that the labels tell apart.
class Components::Finder {
 public:
  // present: (n,), or null if all are; the labels are of the same.
  Finder(const Layout& whole, const double* coef, const ComponentLabels& labels,
         const std::uint8_t* present, Components& made)
      : p_(whole),
        s_(whole.structured),
        coef_(coef),
        labels_(labels),
        present_(present),
        made_(made),
        place_(static_cast<std::size_t>(whole.num_vars)),
        owner_(static_cast<std::size_t>(present == nullptr ? 0 : whole.num_vars), -1) {}

  void lay_out() {
    const int count = labels_.count();
    const auto of_factors = [&](int first) {
      return [=](int f) { return labels_.of_factor(first + f); };
    };
    const Sorted vars(p_.num_vars, count, [&](int j) { return labels_.of_var(j); });
    const Sorted blocks(p_.num_blocks, count, of_factors(0));
    const Sorted pairs(p_.num_pairs, count, of_factors(p_.num_blocks));
    const Sorted factors(s_.count, count, of_factors(p_.num_blocks + p_.num_pairs));
    std::vector<std::int32_t> link(1, p_.num_rows + p_.num_pairs);  // where a factor's links begin
    for (int f = 0; f < s_.count; ++f) {
      link.push_back(link.back() + (s_.linked[f] != 0 ? s_.vars(f).size : 0));
    }
    made_.all_.resize(static_cast<std::size_t>(count));
    made_.factor_ = factors.item;
    made_.var_.reserve(static_cast<std::size_t>(p_.num_vars) + most_ghosts());
    made_.dual_.reserve(static_cast<std::size_t>(p_.num_dual()));
    made_.score_.reserve(static_cast<std::size_t>(p_.num_scores()));
    for (int c = 0; c < count; ++c) {
      const std::size_t var = made_.var_.size(), dual = made_.dual_.size(),
                        score = made_.score_.size();
      now_.clear();
      component_ = c;
      for (const std::int32_t j : vars.of(c)) take(j);
      const int own = now_.num_vars;
      for (const std::int32_t f : blocks.of(c)) add_block(f);
      for (const std::int32_t q : pairs.of(c)) add_pair(q);
      for (const std::int32_t f : factors.of(c)) add_factor(f, link[f], link[f + 1]);
      Component& component = made_.all_[c];
      component.vars = indices(made_.var_, var, made_.var_.size(), now_.num_vars - own);
      component.dual = indices(made_.dual_, dual, made_.dual_.size());
      component.scores = indices(made_.score_, score, made_.score_.size());
      component.factors = indices(made_.factor_, factors.ptr[c], factors.ptr[c + 1]);
      // Few of those that masks leave are alike, unless they have structured factors.
      const bool compare = present_ == nullptr || component.factors.count > 0;
      component.kind = compare ? kind_of_this() : new_kind();
    }
  }

 private:
  const std::int32_t* block_begin(int f) const { return p_.col + p_.row_ptr[p_.block_ptr[f]]; }

  // At most so many masked variables stand beside components that they are not in.
  std::size_t most_ghosts() const {
    if (present_ == nullptr) return 0;
    const auto absent = [&](std::int32_t j) { return present_[j] == 0; };
    const std::int32_t* last = s_.count == 0 ? s_.var : s_.var + s_.var_ptr[s_.count];
    return std::count_if(p_.col, p_.col + p_.num_entries, absent) +
           std::count_if(p_.pair_var, p_.pair_var + 2 * p_.num_pairs, absent) +
           std::count_if(s_.var, last, absent);
  }

  // The next variable of this component.
  void take(std::int32_t j) {
    if (present_ != nullptr) owner_[j] = component_;
    place_[j] = now_.num_vars++;
    made_.var_.push_back(j);
  }
  // The number of a factor's variable in this component. Only a masked one can be in another.
  std::int32_t place(std::int32_t j) {
    if (present_ != nullptr && owner_[j] != component_) take(j);
    return place_[j];
  }

  void add_block(int f) {
    if (coef_ != nullptr) {
      const std::int64_t begin = block_begin(f) - p_.col, end = block_begin(f + 1) - p_.col;
      now_.coef.insert(now_.coef.end(), coef_ + begin, coef_ + end);
    }
    for (int r = p_.block_ptr[f]; r < p_.block_ptr[f + 1]; ++r) {
      for (int k = p_.row_ptr[r]; k < p_.row_ptr[r + 1]; ++k) now_.col.push_back(place(p_.col[k]));
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
      now_.pair_var.push_back(place(p_.pair_var[2 * q + end]));
      now_.pair_negated.push_back(p_.pair_negated[2 * q + end]);
    }
    now_.block_isolated.push_back(p_.block_isolated[p_.num_blocks + q]);
    made_.dual_.push_back(p_.num_rows + q);
    made_.score_.push_back(q);
  }

  void add_factor(int f, int first_link, int last_link) {
    for (const std::int32_t j : s_.vars(f)) now_.var.push_back(place(j));
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
    known_.emplace(hash, made_.num_kinds());
    return new_kind();
  }

  int new_kind() {
    auto kind = std::make_unique<Kind>();
    kind->arrays = now_;
    kind->layout = kind->arrays.layout();
    kind->work = now_.work();
    made_.kinds_.push_back(std::move(kind));
    return made_.num_kinds() - 1;
  }

  // The lists have their final size from the start: they do not move.
  static Indices indices(const std::vector<std::int32_t>& list, std::size_t begin, std::size_t end,
                         int ghosts = 0) {
    return Indices::of(list.data() + begin, static_cast<int>(end - begin), ghosts);
  }

  const Layout& p_;
  const Structured& s_;
  const double* coef_;
  const ComponentLabels& labels_;
  const std::uint8_t* present_;
  Components& made_;
  int component_ = 0;                // the one that is laid out
  std::vector<std::int32_t> place_;  // (n,) number in its component
  std::vector<std::int32_t> owner_;  // (n,) which component that is, if not all are present
  Arrays now_;
  std::unordered_multimap<std::uint64_t, int> known_;
};

std::unique_ptr<const Components> Components::of(const Layout& whole, const double* coef) {
  ComponentLabels labels(whole);
  if (labels.count() < 2) return nullptr;
  labels.gather_closed();
  if (labels.count() < 2) return nullptr;
  auto made = std::make_unique<Components>();
  Finder(whole, coef, labels, nullptr, *made).lay_out();
  made->cut_into_chunks();
  return made;
}

bool Components::may_part(const Layout& whole) {
  // In smaller graphs, finding the parts took as long as they saved: in grids, and among structured
  // factors that only rows and pairs join. Links take the more passes the larger the graph is.
  constexpr int kLarge = 8192, kLargeStructured = 16384, kLargeLinked = 512;
  const Components* known = whole.components;
  const Layout& hardest = known == nullptr ? whole : known->layout((*known)[0].kind);
  const Structured& s = hardest.structured;
  const int least = s.num_links > 0 ? kLargeLinked : s.count > 0 ? kLargeStructured : kLarge;
  return hardest.num_vars >= least;
}

namespace {

// Whether the largest part, of so many variables, is at most two thirds of what would have to be
// solved without parts. Laying them out takes about a fifth of an easy solve: less is not gained.
bool are_worthwhile(const Layout& whole, const std::uint8_t* present, int largest) {
  const Components* known = whole.components;
  std::int64_t before = 0;
  if (known == nullptr) {
    before = std::count(present, present + whole.num_vars, 1);
  } else {
    for (int c = 0; c < known->count(); ++c) {
      const Indices& vars = (*known)[c].vars;
      const auto is_there = [&](std::int32_t j) { return present[j] != 0; };
      const auto there = std::count_if(vars.index, vars.index + vars.count, is_there);
      before = std::max<std::int64_t>(before, there);
    }
  }
  return largest > 0 && 3 * std::int64_t(largest) <= 2 * before;
}

}  // namespace

std::unique_ptr<const Components> Components::of_present(const Layout& whole,
                                                         const std::uint8_t* present) {
  ComponentLabels labels(whole, present);
  if (!are_worthwhile(whole, present, labels.largest(present))) return nullptr;
  labels.gather_neighbours();
  if (labels.count() < 2) return nullptr;
  auto made = std::make_unique<Components>();
  Finder(whole, nullptr, labels, present, *made).lay_out();
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
