// Helpers shared by the parts of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "kernel.h"
#include "step_check.h"

namespace octavo {

template <typename T, size_t N>
using Array = nanobind::ndarray<const T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
constexpr const char* element_name();
template <>
constexpr const char* element_name<int32_t>() {
    return "int32";
}
template <>
constexpr const char* element_name<uint32_t>() {
    return "uint32";
}
template <>
constexpr const char* element_name<float>() {
    return "float32";
}

// The memory of a contiguous N-dimensional numpy array of T, kept alive. It uses the buffer protocol: a step reads
// about 24 arrays while the workers are idle, and nb::ndarray touches more memory for each.
template <typename T, size_t N>
class Buffer {
  public:
    Buffer() = default;
    // Throws ValueError naming `name` for any other object, or for a read-only array if `writable` is set.
    Buffer(nanobind::handle array, const char* name, bool writable = false) {
        const int flags = PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        const char format[] = {std::is_same_v<T, float> ? 'f' : std::is_signed_v<T> ? 'i' : 'I', 0};
        if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
            PyErr_Clear();
            fail(name);
        }
        if (view_.ndim != static_cast<int>(N) || !view_.format || std::strcmp(view_.format, format) != 0) {
            PyBuffer_Release(&view_);
            fail(name);
        }
        for (size_t i = 0; i < N; ++i) shape_[i] = static_cast<size_t>(view_.shape[i]);
    }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() { PyBuffer_Release(&view_); }

    // Null if default-constructed.
    T* data() const { return static_cast<T*>(view_.buf); }
    size_t shape(size_t dimension) const { return shape_[dimension]; }
    size_t size() const { return static_cast<size_t>(view_.len) / sizeof(T); }

  private:
    void swap(Buffer& other) {
        std::swap(view_, other.view_);
        std::swap(shape_, other.shape_);
    }
    [[noreturn]] static void fail(const char* name) {
        static const char* const DIMENSIONS[] = {"no", "one dimension", "two dimensions", "three dimensions"};
        throw nanobind::value_error(
            (std::string(name) + " must be a contiguous " + element_name<T>() + " array of " + DIMENSIONS[N]).c_str());
    }

    Py_buffer view_{};
    size_t shape_[N] = {};
};

// The attribute `name` of a batch, without conversion. Throws ValueError naming the attribute.
template <typename T, size_t N>
Buffer<T, N> read_array(nanobind::handle owner, const char* name) {
    return Buffer<T, N>(nanobind::object(owner.attr(name)), name);
}

// As above, but the array must have the given length.
template <typename T>
Buffer<T, 1> read_array(nanobind::handle owner, const char* name, size_t length) {
    Buffer<T, 1> array = read_array<T, 1>(owner, name);
    if (array.shape(0) != length)
        throw nanobind::value_error((std::string(name) + " has " + std::to_string(array.shape(0)) +
                                     " entries, must have " + std::to_string(length))
                                        .c_str());
    return array;
}

// bindings_weights.cpp: packing and the class PackedWeight.
void bind_weights(nanobind::module_& module);
// Returns the weight inside a Python PackedWeight. Throws TypeError for any other object.
const PackedWeight* packed_weight_of(nanobind::handle object);

// bindings_quantize.cpp
void bind_quantize(nanobind::module_& module);

// bindings_collective.cpp: groups of ranks.
void bind_collective(nanobind::module_& module);

}  // namespace octavo
