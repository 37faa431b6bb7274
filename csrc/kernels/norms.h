// Sums over the columns of one row, in an order that depends only on their number.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

// Adds term(chunk of x, lanes) over n floats. Lanes beyond n hold `fill`, which must make term zero.
template <typename F>
inline float sum_columns(const float* x, int64_t n, float fill, F term) {
    F32x16 sum = broadcast(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum = term(load(x + i), sum);
    if (i < n) sum = term(load_partial(x + i, static_cast<int>(n - i), fill), sum);
    return reduce_add(sum);
}

inline float sum_of_squares(const float* x, int64_t n) {
    return sum_columns(x, n, 0.0f, [](F32x16 v, F32x16 sum) { return fma(v, v, sum); });
}

// out[i] = f(x[i], i-th chunk of a weight); read(p) gives the lanes of p that belong to those of x.
template <typename F>
inline void map_columns(float* out, const float* x, int64_t n, F f) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, f(load(x + i), [i](const float* p) { return load(p + i); }));
    if (i < n) {
        const int lanes = static_cast<int>(n - i);
        const auto read = [i, lanes](const float* p) { return load_partial(p + i, lanes); };
        store_partial(out + i, f(load_partial(x + i, lanes), read), lanes);
    }
}

// x [n] / rms(x) * weight, or without weight if it is null. Implements RMSNorm for one group.
inline void rms_norm_group(float* out, const float* x, const float* weight, int64_t n, float eps) {
    const F32x16 inverse = broadcast(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps));
    if (!weight) return map_columns(out, x, n, [&](F32x16 v, auto) { return v * inverse; });
    map_columns(out, x, n, [&](F32x16 v, auto read) { return v * inverse * read(weight); });
}

}  // namespace
}  // namespace octavo
