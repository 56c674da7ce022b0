// Sets of words, and what of the words' heads is outside of them: the rows of docs/math.md (60).
#pragma once

#include "factormax/structured/set_system.hpp"
#include "factormax/structured/word_heads.hpp"

namespace factormax {

// Flags are kept by set, for the heads of a word, and by word, for all sets at once.
class WordSets {
 public:
  void allocate(int words, int most, Workspace& ws) {
    n_ = words;
    most_ = most;
    stride_ = WordHeads::padded(words);
    wide_ = WordHeads::padded(most);
    member_ = ws.take<std::uint8_t>(std::int64_t(most) * words);
    outside_ = ws.take<double>(std::int64_t(most) * stride_);
    size_ = ws.take<std::int32_t>(most);
    for (Span<double>* a : {&inside_of_, &outside_of_}) {
      *a = ws.take<double>(std::int64_t(words) * wide_);
    }
    ones_ = ws.take<double>(8);
    column_ = ws.take<double>(std::int64_t(most) * words);
    free_ = ws.take<double>(most);
    touching_ = ws.take<std::int32_t>(most);
  }

  // How long vectors with an entry for each set have to be.
  static int length(int most) { return WordHeads::padded(most); }

  int count = 0;

  void clear() {
    count = 0;
    fill(ones_, 1.0);
  }

  Span<const std::uint8_t> members(int s) const {
    return {member_.data + std::int64_t(s) * n_, n_};
  }
  int size(int s) const { return size_[s]; }
  // (stride,) 1 where a word is no member.
  const double* outside(int s) const { return outside_.data + std::int64_t(s) * stride_; }
  // Whether head h of word m, which is in set s, is outside of it: the root is.
  double coef(int s, int m, int h) const { return h == m ? 1.0 : outside(s)[h]; }

  bool is_known(const std::uint8_t* member) const {
    for (int s = 0; s < count; ++s) {
      if (std::equal(member, member + n_, members(s).begin())) return true;
    }
    return false;
  }

  // Returns whether there was room.
  bool add(const std::uint8_t* member) {
    if (count == most_) return false;
    const int s = count++;
    int size = 0;
    double* out = outside_.data + std::int64_t(s) * stride_;
    for (int m = 0; m < n_; ++m) {
      double* in = inside_of_.data + std::int64_t(m) * wide_ + s;
      double* not_in = outside_of_.data + std::int64_t(m) * wide_ + s;
      if (s % 8 == 0) {  // the padding too
        std::fill_n(in, 8, 0.0);
        std::fill_n(not_in, 8, 0.0);
      }
      const bool inside = member[m] != 0;
      size += inside;
      member_[std::int64_t(s) * n_ + m] = inside;
      *in = inside ? 1.0 : 0.0;
      out[m] = *not_in = inside ? 0.0 : 1.0;
    }
    std::fill(out + n_, out + stride_, 0.0);
    size_[s] = size;
    return true;
  }

  // g: (length,) what each set has of the words' `value` from outside.
  FACTORMAX_VECTOR void products(const WordHeads& words, Span<double> g) {
    constexpr int kBlock = 8;
    fill(g.first(WordHeads::padded(count)), 0.0);
    for (int m = 0; m < n_; ++m) {
      const std::int32_t* heads = words.head(m);
      const double* value = words.value(m);
      for (int first = 0; first < count; first += kBlock) {
        double sum[kBlock] = {};
        for (int k = 0; k < words.count[m]; ++k) {
          const double* out = heads[k] == m
                                  ? ones_.data
                                  : outside_of_.data + std::int64_t(heads[k]) * wide_ + first;
          for (int j = 0; j < kBlock; ++j) sum[j] += value[k] * out[j];
        }
        const double* in = inside_of_.data + std::int64_t(m) * wide_ + first;
        for (int j = 0; j < kBlock; ++j) g.data[first + j] += in[j] * sum[j];
      }
    }
  }

  // The matrix of the first `active` sets of `which`, docs/math.md (61c).
  void build(const WordHeads& words, Span<const std::int32_t> which, int active,
             SetSystem& system) {
    system.clear(active);
    for (int m = 0; m < n_; ++m) {
      const int free = words.count[m];
      if (free < 2) continue;
      int rows = 0;
      for (int i = 0; i < active; ++i) {
        const int s = which[i];
        if (!member_[std::int64_t(s) * n_ + m]) continue;
        double* b = column_.data + std::int64_t(rows) * n_;
        double sum = 0;
        for (int k = 0; k < free; ++k) sum += b[k] = coef(s, m, words.head(m)[k]);
        if (sum == 0 || sum == free) continue;  // nothing to choose
        touching_[rows] = i;
        free_[rows] = sum;
        for (int other = 0; other <= rows; ++other) {
          const double* c = column_.data + std::int64_t(other) * n_;
          double product = -sum * free_[other] / free;
          for (int k = 0; k < free; ++k) product += b[k] * c[k];
          system.entry(i, touching_[other]) += product;
        }
        ++rows;
      }
    }
  }

 private:
  int n_ = 0, most_ = 0, stride_ = 0, wide_ = 0;
  Span<std::uint8_t> member_;            // (most, n)
  Span<double> outside_;                 // (most, stride)
  Span<std::int32_t> size_;              // (most,)
  Span<double> inside_of_, outside_of_;  // (n, wide)
  Span<double> ones_;                    // (8,)
  Span<double> column_, free_;           // (most, n), (most,)
  Span<std::int32_t> touching_;          // (most,)
};

}  // namespace factormax
