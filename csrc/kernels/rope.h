// Rotary embedding: the cosines and sines of one token, and the rotation of one head.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

struct RopeTable {
    const float* frequencies;  // radians per position; null: no rotation
    int32_t half;              // number of rotated pairs
    float attention_factor;
    const float* axes;  // the component of the position for each frequency; null: positions have one component
};

// table: cos[half], then sin[half]. position: called for each frequency. The angle is reduced in double, because at
// position 100,000 a float angle is off by 0.004 radians. Taylor polynomials on [-pi/4, pi/4], error below 1e-9.
template <typename P>
inline void compute_cos_sin_by(const RopeTable& rope, P position, float* table) {
    for (int32_t i = 0; i < rope.half; ++i) {
        const double angle = static_cast<double>(position(i)) * static_cast<double>(rope.frequencies[i]);
        const double turns = __builtin_rint(angle * 0.63661977236758134308);  // quarter turns
        const double r = angle - turns * 1.57079632679489661923, r2 = r * r;
        const double s = r * (1.0 + r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880)))));
        const double c =
            1.0 + r2 * (-0.5 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 - r2 * (1.0 / 3628800)))));
        const int32_t quadrant = static_cast<int32_t>(turns) & 3;
        const double cosine = quadrant & 1 ? s : c, sine = quadrant & 1 ? c : s;
        const double factor = rope.attention_factor;
        table[i] = static_cast<float>((quadrant == 1 || quadrant == 2 ? -cosine : cosine) * factor);
        table[rope.half + i] = static_cast<float>((quadrant >= 2 ? -sine : sine) * factor);
    }
}

// As above, for one row of a domain.
inline void compute_cos_sin(const RopeTable& rope, const DomainRows& rows, int64_t row, float* table) {
    if (rope.axes && rows.components > 1) {
        const auto component = [&](int32_t i) { return static_cast<int64_t>(rope.axes[i]); };
        compute_cos_sin_by(rope, [&](int32_t i) { return rows.positions[component(i) * rows.count + row]; }, table);
    } else {
        const int32_t position = rows.positions[row];
        compute_cos_sin_by(rope, [position](int32_t) { return position; }, table);
    }
}

// Rotates column i together with column half + i.
inline void rotate_pairs(const float* x, float* out, const float* cosines, int32_t half) {
    const float* sines = cosines + half;
    for (int32_t i = 0; i < half; i += 16) {
        const int n = half - i < 16 ? half - i : 16;
        const F32x16 c = n == 16 ? load(cosines + i) : load_partial(cosines + i, n);
        const F32x16 s = n == 16 ? load(sines + i) : load_partial(sines + i, n);
        const F32x16 a = n == 16 ? load(x + i) : load_partial(x + i, n);
        const F32x16 b = n == 16 ? load(x + half + i) : load_partial(x + half + i, n);
        const F32x16 first = a * c - b * s, second = b * c + a * s;
        if (n == 16) {
            store(out + i, first);
            store(out + half + i, second);
        } else {
            store_partial(out + i, first, n);
            store_partial(out + half + i, second, n);
        }
    }
}

// Rotates one head; `out` may be `x`. Columns beyond the rotated ones are copied.
inline void rotate_head(const RopeTable& rope, const float* table, const float* x, float* out, int32_t head_dim) {
    rotate_pairs(x, out, table, rope.half);
    for (int32_t i = 2 * rope.half; i < head_dim; ++i) out[i] = x[i];
}

}  // namespace
}  // namespace octavo
