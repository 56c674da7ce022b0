// The lists of structures that a solve found, as its derivative reads them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "factormax/batch.hpp"
#include "factormax/components.hpp"
#include "factormax/structured/structured.hpp"

namespace factormax {

// Where the structures of each factor of each instance begin.
struct StructureOffsets {
  std::vector<std::int64_t> structure, on, features, dense, cuts;  // (B * S + 1,)

  explicit StructureOffsets(std::size_t factors = 0) {
    for (auto* a : {&structure, &on, &features, &dense, &cuts}) a->assign(factors + 1, 0);
  }
};

template <class T>
StructureOffsets offsets_of(const Problem<T>& problem, std::int64_t batch,
                            const std::int32_t* count, const std::int32_t* num_cuts) {
  const std::vector<StructureSizes> sizes = structure_sizes(problem);
  StructureOffsets at(batch * sizes.size());
  for (std::size_t k = 0; k < batch * sizes.size(); ++k) {
    const std::size_t f = k % sizes.size();
    const std::int64_t found = count[k], lists = std::max(num_cuts[k], 0);
    at.structure[k + 1] = at.structure[k] + found;
    at.on[k + 1] = at.on[k] + found * sizes[f].slots;
    at.features[k + 1] = at.features[k] + found * sizes[f].feature_slots;
    at.dense[k + 1] = at.dense[k] + found * sizes[f].dense;
    at.cuts[k + 1] = at.cuts[k] + lists * list_length(problem, static_cast<int>(f));
  }
  return at;
}

// Takes the structures of the forward pass into the active sets.
template <class T>
void adopt(const BatchGradients<T>& grads, const StructureOffsets& at, std::int64_t i,
           StructuredFactors<T>& structured) {
  const Span<StructuredFactor> all = structured.all();
  const std::int64_t first = i * all.size;
  const std::int32_t* count = grads.count + first;
  const double* prob = grads.prob + at.structure[first];
  const std::int32_t* on = grads.on + at.on[first];
  const std::int32_t* features = grads.features + at.features[first];
  const double* dense = grads.dense + at.dense[first];
  const std::int32_t* num_cuts = grads.num_cuts + first;
  const std::uint8_t* flags = grads.cuts + at.cuts[first];
  for (int f = 0; f < all.size; ++f) {
    ActiveSet& set = all[f].set;
    if (num_cuts[f] > 0) {
      all[f].with_flow([&](auto& own) {
        all[f].by_flow = all[f].has_flow && own.adopt(flags, all[f].w.data);
        flags += own.num_flags();
      });
      all[f].present = all[f].present && all[f].by_flow;
      continue;
    }
    for (int k = 0; k < count[f]; ++k) {
      std::copy(on, on + set.shape().slots, set.on(set.count));
      std::copy(features, features + set.shape().feature_slots, set.features(set.count));
      std::copy(dense, dense + set.shape().dense_scores, set.dense(set.count));
      on += set.shape().slots;
      features += set.shape().feature_slots;
      dense += set.shape().dense_scores;
      set.adopt(*prob++);
    }
    all[f].present = all[f].present && set.count > 0;
  }
}

// The structures of one component, its factors side by side.
struct LocalStructures {
  std::vector<std::int32_t> count, num_cuts, on, features;
  std::vector<double> prob, dense, grad_prob;
  std::vector<std::uint8_t> cuts;

  template <class T>
  void gather(const BatchGradients<T>& grads, const StructureOffsets& at, std::int64_t first,
              const Indices& factors, BatchGradients<T>& own) {
    for (auto* list : {&count, &num_cuts, &on, &features}) list->clear();
    for (auto* list : {&prob, &dense, &grad_prob}) list->clear();
    cuts.clear();
    for (int k = 0; k < factors.count; ++k) {
      const std::int64_t f = first + factors.index[k];
      const auto append = [f](auto& to, const auto* from, const std::vector<std::int64_t>& begin) {
        if (from != nullptr) to.insert(to.end(), from + begin[f], from + begin[f + 1]);
      };
      count.push_back(grads.count[f]);
      num_cuts.push_back(grads.num_cuts[f]);
      append(prob, grads.prob, at.structure);
      append(grad_prob, grads.grad_prob, at.structure);
      append(on, grads.on, at.on);
      append(features, grads.features, at.features);
      append(dense, grads.dense, at.dense);
      append(cuts, grads.cuts, at.cuts);
    }
    own.count = count.data();
    own.num_cuts = num_cuts.data();
    own.prob = prob.data();
    own.grad_prob = grads.grad_prob == nullptr ? nullptr : grad_prob.data();
    own.on = on.data();
    own.features = features.data();
    own.dense = dense.data();
    own.cuts = cuts.data();
  }
};

}  // namespace factormax
