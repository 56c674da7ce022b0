// A view of contiguous memory, and an arena that hands such views out. The kernels take both and
// own nothing, so that the same sources can be compiled for a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace factormax {

template <class T>
struct Span {
  T* data = nullptr;
  int size = 0;

  T& operator[](int i) const { return data[i]; }
  T* begin() const { return data; }
  T* end() const { return data + size; }
  bool empty() const { return size == 0; }
  Span first(int count) const { return {data, count}; }
  operator Span<const T>() const { return {data, size}; }
};

// Bump allocator over one block of memory. `Workspace{}` without memory only counts: running the
// same sequence of `take` calls on it first tells how many bytes a kernel needs.
class Workspace {
 public:
  Workspace() = default;
  // `valid()` is false if the memory could not be allocated.
  explicit Workspace(std::size_t bytes)
      : memory_(new (std::nothrow) unsigned char[bytes + kAlign]) {
    if (memory_ == nullptr) return;
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    base_ = memory_.get() + (kAlign - address % kAlign) % kAlign;
  }
  bool valid() const { return base_ != nullptr; }

  template <class T>
  Span<T> take(std::int64_t count) {
    const std::size_t offset = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    if (base_ == nullptr) return {nullptr, static_cast<int>(count)};
    return {reinterpret_cast<T*>(base_ + offset), static_cast<int>(count)};
  }

  unsigned char* data() const { return base_; }
  std::size_t used() const { return used_; }
  void rewind() { used_ = 0; }

 private:
  static constexpr std::size_t kAlign = 64;
  std::unique_ptr<unsigned char[]> memory_;
  unsigned char* base_ = nullptr;
  std::size_t used_ = 0;
};

}  // namespace factormax
