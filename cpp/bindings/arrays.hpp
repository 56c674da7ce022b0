// NumPy arrays, and checks of their shapes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax::python {

namespace nb = nanobind;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumpyVector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <class T>
using NumpyMatrix = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

inline void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

// The shape must be (batch, columns), or (1, columns) if the array may be shared.
template <class T>
Batched<T> batched(const Matrix<T>& array, std::size_t batch, std::size_t columns, const char* name,
                   bool may_share = true) {
  const bool fits =
      array.shape(1) == columns && (array.shape(0) == batch || (may_share && array.shape(0) == 1));
  if (!fits) throw nb::value_error((std::string(name) + " has the wrong shape").c_str());
  return {array.data(), array.shape(0) == batch ? static_cast<std::int64_t>(columns) : 0};
}

// The memory of a vector, handed over to NumPy.
template <class U>
NumpyVector<U> as_array(std::vector<U>&& values) {
  auto* kept = new std::vector<U>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<U>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

// An array that C++ owns, not initialised, and that Python sees as a view.
template <class U>
struct Buffer {
  std::unique_ptr<U[]> data;
  std::size_t rows = 0, columns = 0;

  Buffer() = default;
  Buffer(std::size_t r, std::size_t c) : data(new U[r * c]), rows(r), columns(c) {}

  std::size_t size() const { return rows * columns; }
  Batched<U> batched() const { return {data.get(), static_cast<std::int64_t>(columns)}; }
  NumpyVector<U> vector(nb::handle owner) const { return {data.get(), {size()}, owner}; }
  NumpyMatrix<U> matrix(nb::handle owner) const { return {data.get(), {rows, columns}, owner}; }
};

// Hands the memory over to NumPy.
template <class U>
nb::capsule owner_of(Buffer<U>& buffer) {
  return nb::capsule(buffer.data.release(), [](void* p) noexcept { delete[] static_cast<U*>(p); });
}
template <class U>
NumpyMatrix<U> as_matrix(Buffer<U>&& buffer) {
  U* data = buffer.data.get();
  return {data, {buffer.rows, buffer.columns}, owner_of(buffer)};
}
template <class U>
NumpyVector<U> as_vector(Buffer<U>&& buffer) {
  U* data = buffer.data.get();
  return {data, {buffer.size()}, owner_of(buffer)};
}

}  // namespace factormax::python
