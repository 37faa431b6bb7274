// Helpers that the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "kernel.h"
#include "step_check.h"

namespace octavo {

template <typename T, size_t N>
using Array = nanobind::ndarray<const T, nanobind::ndim<N>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T, size_t N>
constexpr const char* array_description();
template <>
constexpr const char* array_description<int32_t, 1>() {
    return "a contiguous int32 array of one dimension";
}
template <>
constexpr const char* array_description<int32_t, 2>() {
    return "a contiguous int32 array of two dimensions";
}
template <>
constexpr const char* array_description<int32_t, 3>() {
    return "a contiguous int32 array of three dimensions";
}
template <>
constexpr const char* array_description<uint32_t, 2>() {
    return "a contiguous uint32 array of two dimensions";
}
template <>
constexpr const char* array_description<float, 1>() {
    return "a contiguous float32 array of one dimension";
}

// The attribute `name` of a batch as an array, without conversion. Throws ValueError naming the attribute.
template <typename T, size_t N>
Array<T, N> read_array(nanobind::handle owner, const char* name) {
    Array<T, N> array;
    if (!nanobind::try_cast(owner.attr(name), array, false))
        throw nanobind::value_error((std::string(name) + " must be " + array_description<T, N>()).c_str());
    return array;
}

// The same with a length that must be met.
template <typename T>
Array<T, 1> read_array(nanobind::handle owner, const char* name, size_t length) {
    Array<T, 1> array = read_array<T, 1>(owner, name);
    if (array.shape(0) != length)
        throw nanobind::value_error((std::string(name) + " has " + std::to_string(array.shape(0)) +
                                     " entries, must have " + std::to_string(length))
                                        .c_str());
    return array;
}

// bindings_weights.cpp: packing and the class PackedWeight.
void bind_weights(nanobind::module_& module);
// The weight inside a Python PackedWeight; throws TypeError if it is something else.
const PackedWeight* packed_weight_of(nanobind::handle object);

// bindings_sampling.cpp
void bind_sampling(nanobind::module_& module);

}  // namespace octavo
