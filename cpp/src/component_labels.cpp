#include "component_labels.hpp"

#include <algorithm>

namespace factormax {

namespace {

// About how many variables and entries are worth a solve of their own. For what takes many passes,
// 8192 and 32768 were slower by up to a tenth and a third.
constexpr std::int64_t kTogether = 2048;

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
  // Joins the set of j to that of `root`, which stands for it; returns what stands for both.
  std::int32_t join(std::int32_t root, std::int32_t j) {
    const std::int32_t other = find(j);
    parent_[std::max(root, other)] = std::min(root, other);
    return std::min(root, other);
  }

 private:
  std::vector<std::int32_t> parent_;
};

}  // namespace

// visit(f, begin, end): the variables of factor f.
template <class Visit>
void ComponentLabels::each_factor(const Visit& visit) const {
  const auto begin = [&](int f) { return p_.col + p_.row_ptr[p_.block_ptr[f]]; };
  for (int f = 0; f < p_.num_blocks; ++f) visit(f, begin(f), begin(f + 1));
  for (int q = 0; q < p_.num_pairs; ++q) {
    visit(p_.num_blocks + q, p_.pair_var + 2 * q, p_.pair_var + 2 * q + 2);
  }
  for (int f = 0; f < p_.structured.count; ++f) {
    const Span<const std::int32_t> vars = p_.structured.vars(f);
    visit(p_.num_blocks + p_.num_pairs + f, vars.begin(), vars.end());
  }
}

ComponentLabels::ComponentLabels(const Layout& whole)
    : p_(whole),
      of_var_(static_cast<std::size_t>(p_.num_vars)),
      of_factor_(static_cast<std::size_t>(p_.num_blocks) + p_.num_pairs + p_.structured.count) {
  Sets sets(p_.num_vars);
  std::vector<std::uint8_t> in_factor(static_cast<std::size_t>(p_.num_vars), 0);
  bool any_empty = false;  // whether some factor has no variable
  each_factor([&](int, const std::int32_t* begin, const std::int32_t* end) {
    any_empty |= begin == end;
    std::int32_t root = begin == end ? 0 : sets.find(*begin);
    for (const std::int32_t* j = begin; j != end; ++j) {
      in_factor[*j] = 1;
      root = sets.join(root, *j);
    }
  });
  int empty = -1;  // component of variables without factors, and factors without variables
  for (int j = 0; j < p_.num_vars; ++j) {
    const std::int32_t root = sets.find(j);
    if (in_factor[j] == 0) {
      if (empty < 0) empty = count_++;
      of_var_[j] = empty;
    } else {
      of_var_[j] = root == j ? count_++ : of_var_[root];
    }
  }
  if (any_empty && empty < 0) empty = count_++;
  each_factor([&](int f, const std::int32_t* begin, const std::int32_t* end) {
    of_factor_[f] = begin == end ? empty : of_var_[*begin];
  });
}

ComponentLabels::ComponentLabels(const Layout& whole, const std::uint8_t* present)
    : p_(whole),
      of_var_(static_cast<std::size_t>(p_.num_vars)),
      of_factor_(static_cast<std::size_t>(p_.num_blocks) + p_.num_pairs + p_.structured.count) {
  Sets sets(p_.num_vars);
  std::vector<std::uint8_t> placed(present, present + p_.num_vars);
  const int plain = p_.num_blocks + p_.num_pairs;
  each_factor([&](int f, const std::int32_t* begin, const std::int32_t* end) {
    std::int32_t root = -1;
    const auto join = [&](std::int32_t j) { root = root < 0 ? j : sets.join(sets.find(root), j); };
    for (const std::int32_t* j = begin; j != end; ++j) {
      if (present[*j] != 0) join(*j);
    }
    for (const std::int32_t* j = begin; j != end && f >= plain; ++j) {
      if (placed[*j] == 0) join(*j);
      placed[*j] = 1;
    }
    of_factor_[f] = root >= 0 ? root : begin == end ? 0 : *begin;  // one of its variables
  });
  for (int j = 0; j < p_.num_vars; ++j) {
    const std::int32_t root = sets.find(j);
    of_var_[j] = root == j ? count_++ : of_var_[root];
  }
  for (std::int32_t& of : of_factor_) of = of_var_[of];
}

int ComponentLabels::largest(const std::uint8_t* present) const {
  std::vector<int> size(static_cast<std::size_t>(count_), 0);
  for (int j = 0; j < p_.num_vars; ++j) size[of_var_[j]] += present[j] != 0;
  return count_ == 0 ? 0 : *std::max_element(size.begin(), size.end());
}

void ComponentLabels::gather_closed() {
  std::vector<std::int64_t> work(static_cast<std::size_t>(count_), 0);
  std::vector<std::uint8_t> closed(static_cast<std::size_t>(count_), 1);
  for (const std::int32_t c : of_var_) ++work[c];
  const int plain = p_.num_blocks + p_.num_pairs;
  each_factor([&](int f, const std::int32_t* begin, const std::int32_t* end) {
    const std::int32_t c = of_factor_[f];
    work[c] += end - begin;
    closed[c] &= f < plain && p_.block_isolated[f] != 0;
  });
  std::vector<std::int32_t> small;  // like ones together
  for (int c = 0; c < count_; ++c) {
    if (closed[c] != 0 && work[c] < kTogether) small.push_back(c);
  }
  std::stable_sort(small.begin(), small.end(), [&](int a, int b) { return work[a] < work[b]; });
  std::vector<std::int32_t> group(static_cast<std::size_t>(count_), -1);
  int first = -1;
  std::int64_t sum = 0;
  for (const std::int32_t c : small) {
    if (first < 0 || sum + work[c] > kTogether) {
      first = c;
      sum = 0;
    }
    group[c] = first;
    sum += work[c];
  }
  renumber(group);
}

void ComponentLabels::gather_neighbours() {
  std::vector<std::int64_t> work(static_cast<std::size_t>(count_), 0);
  for (const std::int32_t c : of_var_) ++work[c];
  const int plain = p_.num_blocks + p_.num_pairs;
  each_factor([&](int f, const std::int32_t* begin, const std::int32_t* end) {
    work[of_factor_[f]] += f < plain ? end - begin : kTogether;
  });
  std::vector<std::int32_t> group(static_cast<std::size_t>(count_), -1);
  int first = -1;
  std::int64_t sum = 0;
  for (int c = 0; c < count_; ++c) {
    if (work[c] >= kTogether) continue;
    if (first < 0 || sum >= kTogether) {
      first = c;
      sum = 0;
    }
    group[c] = first;
    sum += work[c];
  }
  renumber(group);
}

// group: for each component, the first one of those that it goes together with; -1: it stays alone.
void ComponentLabels::renumber(std::vector<std::int32_t>& group) {
  std::vector<std::int32_t> number(static_cast<std::size_t>(count_), -1);
  int count = 0;
  for (int c = 0; c < count_; ++c) {
    std::int32_t& own = number[group[c] < 0 ? c : group[c]];
    if (own < 0) own = count++;
    group[c] = own;
  }
  for (auto* list : {&of_var_, &of_factor_}) {
    for (std::int32_t& c : *list) c = group[c];
  }
  count_ = count;
}

}  // namespace factormax
