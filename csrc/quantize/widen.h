// Converts 16-bit numbers to the floats that quantizers read, and finds numbers that blocks cannot represent.
#pragma once

#include "tile.h"

namespace octavo {
namespace {

// count: a multiple of 16. out: null if x has floats already. Returns whether all are finite and at most LARGEST_HALF
// in magnitude.
inline bool widen(const void* x, FloatType type, int64_t count, float* out) {
    const F32x16 beyond = broadcast(65504.00390625f);  // the next float
    static_assert(LARGEST_HALF == 65504.0f, "the limit");
    F32x16 good = broadcast(1.0f);
    const auto read = [&](auto load_one) {
        for (int64_t i = 0; i < count; i += LANES) {
            const F32x16 v = load_one(i);
            good = select_greater(beyond, abs(v), good, zero());  // false for NaN, too
            if (out) store(out + i, v);
        }
    };
    const auto* const words = static_cast<const uint16_t*>(x);
    if (type == FloatType::f16)
        read([&](int64_t i) { return load_f16(words + i); });
    else if (type == FloatType::bf16)
        read([&](int64_t i) { return load_bf16(words + i); });
    else
        read([&](int64_t i) { return load(static_cast<const float*>(x) + i); });
    float lanes[LANES];
    store(lanes, good);
    for (const float lane : lanes)
        if (lane == 0.0f) return false;
    return true;
}

}  // namespace
}  // namespace octavo
