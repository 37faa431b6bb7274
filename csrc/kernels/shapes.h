// Checks on the shapes of a record's operands, for the NAME_fits functions of kernels. They cover the largest step.
#pragma once

#include "kernel.h"
#include "packed_weight.h"

namespace octavo {
namespace {

inline bool is_absent(const View& view) { return view.cols == 0; }
inline bool is_absent(const Weight& weight) { return !weight.packed && !weight.data; }

inline bool has_cols(const View& view, int64_t cols) { return cols > 0 && view.cols == cols; }

inline bool has_rows_of(const View& view, const View& other) { return view.rows == other.rows; }

// Same numbers of rows and columns.
inline bool is_like(const View& view, const View& other) {
    return has_cols(view, other.cols) && has_rows_of(view, other);
}

// A plain weight with `size` floats.
inline bool is_vector(const Weight& weight, int64_t size) {
    return !weight.packed && weight.data && weight.size == size;
}

inline bool is_vector_or_absent(const Weight& weight, int64_t size) {
    return is_absent(weight) || is_vector(weight, size);
}

// Each head has the same odd number of values: attention_softmax.h.
inline bool is_distance_bias_or_absent(const Weight& weight, int64_t heads) {
    const int64_t size = static_cast<int64_t>(weight.size);
    return is_absent(weight) || (is_vector(weight, size) && size % heads == 0 && size / heads % 2 == 1);
}

// A packed weight [rows, cols].
inline bool is_matrix(const Weight& weight, int64_t rows, int64_t cols) {
    return weight.packed && weight.packed->n == rows && weight.packed->k == cols;
}

inline bool is_within(int64_t value, int64_t first, int64_t last) { return first <= value && value <= last; }

// A unary function that `with_activation` supports.
inline bool is_activation(int64_t kind) { return is_within(kind, KIND_SILU, KIND_BELOW_ZERO); }

}  // namespace
}  // namespace octavo
