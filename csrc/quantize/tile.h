// 16 blocks at a time, one per lane, so that the search for scales is the same arithmetic in all lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantizer.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int LANES = 16;
constexpr float LARGEST_HALF = 65504.0f, SMALLEST_VALUE = 1e-15f;

inline F32x16 zero() { return broadcast(0.0f); }
inline F32x16 clamp(F32x16 a, F32x16 low, F32x16 high) { return min(max(a, low), high); }
// 1 / a, or 0 if a is nearly 0, so that quotients by it become 0
inline F32x16 inverse(F32x16 a) {
    const F32x16 tiny = broadcast(SMALLEST_VALUE), one = broadcast(1.0f), size = abs(a);
    return select_greater(size, tiny, one / select_greater(size, tiny, a, one), zero());
}
// Rounds to the nearest float16, as a float
inline F32x16 rounded_half(F32x16 a) {
    const F32x16 limit = broadcast(LARGEST_HALF);
    uint16_t bits[LANES];
    store_f16(bits, clamp(a, zero() - limit, limit));
    return load_f16(bits);
}
inline void put_half(uint8_t* out, float value) {
    uint16_t bits[LANES];
    store_f16(bits, broadcast(value));
    std::memcpy(out, bits, 2);
}

// N values of each of 16 blocks, and their weights in the error.
template <int N>
struct Tile {
    F32x16 x[N], w[N], wx[N];
    F32x16 sum_w, sum_wx;
    bool weighted;  // otherwise all weights are 1
};

// The addresses of a tile's blocks. Lanes without a block repeat the last one.
struct Lanes {
    const float* x[LANES];
    const float* w[LANES];  // null: all 1
};

// Transposes 16 rows of N values into lanes, in 4 x 4 squares that stay in registers.
template <int N>
void transpose(const float* const (&from)[LANES], F32x16 (&to)[N]) {
    static_assert(N % 4 == 0);
    typedef float F32x4 __attribute__((vector_size(16)));
    alignas(64) float rows[N][LANES];
    for (int lane = 0; lane < LANES; lane += 4)
        for (int i = 0; i < N; i += 4) {
            F32x4 a, b, c, d;
            std::memcpy(&a, from[lane] + i, 16);
            std::memcpy(&b, from[lane + 1] + i, 16);
            std::memcpy(&c, from[lane + 2] + i, 16);
            std::memcpy(&d, from[lane + 3] + i, 16);
            const F32x4 ac = __builtin_shufflevector(a, c, 0, 4, 1, 5), AC = __builtin_shufflevector(a, c, 2, 6, 3, 7);
            const F32x4 bd = __builtin_shufflevector(b, d, 0, 4, 1, 5), BD = __builtin_shufflevector(b, d, 2, 6, 3, 7);
            const F32x4 columns[4] = {
                __builtin_shufflevector(ac, bd, 0, 4, 1, 5), __builtin_shufflevector(ac, bd, 2, 6, 3, 7),
                __builtin_shufflevector(AC, BD, 0, 4, 1, 5), __builtin_shufflevector(AC, BD, 2, 6, 3, 7)};
            for (int column = 0; column < 4; ++column) std::memcpy(&rows[i + column][lane], &columns[column], 16);
        }
    for (int i = 0; i < N; ++i) to[i] = load(rows[i]);
}

template <int N>
void load_tile(const Lanes& lanes, Tile<N>& tile) {
    transpose(lanes.x, tile.x);
    tile.weighted = lanes.w[0] != nullptr;
    if (tile.weighted) {
        transpose(lanes.w, tile.w);
    } else {
        for (int i = 0; i < N; ++i) tile.w[i] = broadcast(1.0f);
    }
    tile.sum_w = tile.sum_wx = zero();
    for (int i = 0; i < N; ++i) {
        tile.wx[i] = tile.w[i] * tile.x[i];
        tile.sum_w = tile.sum_w + tile.w[i];
        tile.sum_wx = tile.sum_wx + tile.wx[i];
    }
}

// Calls use(lanes, first block, number of blocks) for every 16 blocks of N values, row by row.
template <int N, class Use>
void for_each_tile(const QuantizeRows& rows, Use use) {
    const int64_t per_row = rows.k / N, blocks = per_row * rows.rows;
    for (int64_t first = 0; first < blocks; first += LANES) {
        Lanes lanes;
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t block = first + lane < blocks ? first + lane : blocks - 1;
            lanes.x[lane] = rows.x + block * N;
            lanes.w[lane] = rows.importance ? rows.importance + block % per_row * N : nullptr;
        }
        use(lanes, first, static_cast<int>(blocks - first < LANES ? blocks - first : LANES));
    }
}

// Integers from low to high.
struct Whole {
    F32x16 low, high;
    Whole(float low_, float high_) : low(broadcast(low_)), high(broadcast(high_)) {}
    F32x16 nearest(F32x16 t) const { return clamp(round_even(t), low, high); }
    // The code of a value returned by `nearest`
    F32x16 code(F32x16 value) const { return value - low; }
};

// The 16 values of IQ4_NL and IQ4_XS.
struct Curve {
    static constexpr float VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    F32x16 nearest(F32x16 t) const {
        F32x16 value = broadcast(VALUES[0]);
        for (int i = 1; i < 16; ++i)
            value = select_greater(t, broadcast((VALUES[i - 1] + VALUES[i]) / 2), broadcast(VALUES[i]), value);
        return value;
    }
    F32x16 code(F32x16 value) const {
        F32x16 code = zero();
        for (int i = 1; i < 16; ++i)
            code = select_greater(value, broadcast(VALUES[i] - 0.5f), broadcast(static_cast<float>(i)), code);
        return code;
    }
};

// The E2M1 numbers of MXFP4, doubled; code 8 and above are negative.
struct DoubledE2M1 {
    F32x16 nearest(F32x16 t) const {
        static constexpr float VALUES[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        const F32x16 size = abs(t);
        F32x16 value = zero();
        for (int i = 1; i < 8; ++i)
            value = select_greater(size, broadcast((VALUES[i - 1] + VALUES[i]) / 2), broadcast(VALUES[i]), value);
        return select_greater(zero(), t, zero() - value, value);
    }
    F32x16 code(F32x16 value) const {
        static constexpr float BETWEEN[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
        F32x16 code = select_greater(zero(), value, broadcast(8.0f), zero());
        for (const float threshold : BETWEEN)
            code = code + select_greater(abs(value), broadcast(threshold), broadcast(1.0f), zero());
        return code;
    }
};

// The value farthest from 0, with its sign.
template <int N>
F32x16 farthest(const Tile<N>& tile) {
    F32x16 low = tile.x[0], high = low;
    for (int i = 1; i < N; ++i) {
        low = min(low, tile.x[i]);
        high = max(high, tile.x[i]);
    }
    return select_greater(zero() - low, high, low, high);
}

// x is near scale * level. Measures the error that a scale removes, and finds the best scale for the same levels.
struct ScaleFit {
    F32x16 gain, scale;
};

template <bool Weighted, int N, class Levels>
ScaleFit fit_scale(const Tile<N>& tile, const Levels& levels, F32x16 inverse_scale) {
    F32x16 xq = zero(), qq = zero();
    for (int i = 0; i < N; ++i) {
        const F32x16 q = levels.nearest(tile.x[i] * inverse_scale);
        xq = fma(Weighted ? tile.wx[i] : tile.x[i], q, xq);
        qq = fma(Weighted ? tile.w[i] * q : q, q, qq);
    }
    const F32x16 scale = xq * inverse(qq);
    return {scale * xq, scale};
}

// The scale of each block with the smallest error. reaches: candidate levels for the farthest value. rounds: how often
// the best scale is refitted to the levels that it gives.
template <int N, class Levels, int Count>
F32x16 search_scale(const Tile<N>& tile, const Levels& levels, const float (&reaches)[Count], int rounds) {
    const F32x16 far = farthest(tile), to_one = inverse(far);
    ScaleFit best = {zero(), far * broadcast(1 / reaches[0])};
    const auto try_scale = [&](F32x16 inverse_scale) {
        const ScaleFit fit = tile.weighted ? fit_scale<true>(tile, levels, inverse_scale)
                                           : fit_scale<false>(tile, levels, inverse_scale);
        best.scale = select_greater(fit.gain, best.gain, fit.scale, best.scale);
        best.gain = max(fit.gain, best.gain);
    };
    for (const float reach : reaches) try_scale(to_one * broadcast(reach));
    for (int round = 0; round < rounds; ++round) try_scale(inverse(best.scale));
    return best.scale;
}

// x is near scale * level + offset.
struct LineFit {
    F32x16 gain, scale, offset;
};

// offsets: whether to allow them; only negative ones, as minimums of K types are stored
template <bool Weighted, int N>
LineFit fit_line(const Tile<N>& tile, const Whole& levels, F32x16 inverse_scale, F32x16 origin, bool offsets) {
    F32x16 sum_q = zero(), qq = zero(), xq = zero();
    const F32x16 shift = zero() - origin * inverse_scale;
    for (int i = 0; i < N; ++i) {
        const F32x16 q = levels.nearest(fma(tile.x[i], inverse_scale, shift));
        const F32x16 wq = Weighted ? tile.w[i] * q : q;
        sum_q = sum_q + wq;
        qq = fma(wq, q, qq);
        xq = fma(Weighted ? tile.wx[i] : tile.x[i], q, xq);
    }
    // Both relative to the centre of the levels, so that the sums of squares lose no digits to the mean.
    const F32x16 mean_q = sum_q * inverse(tile.sum_w), mean_x = tile.sum_wx * inverse(tile.sum_w);
    const F32x16 spread = max(qq - mean_q * sum_q, zero()), joint = xq - mean_q * tile.sum_wx;
    const F32x16 scale = joint * inverse(spread), offset = mean_x - scale * mean_q;
    const LineFit free = {scale * joint + mean_x * tile.sum_wx, scale, offset};
    if (!offsets) return free;
    const F32x16 alone = xq * inverse(qq);
    const auto pick = [&](F32x16 zero_offset, F32x16 other) {
        return select_greater(offset, zero(), zero_offset, other);
    };
    return {pick(alone * xq, free.gain), pick(alone, scale), pick(zero(), offset)};
}

// steps: fractions of a level by which the range from the lowest to the highest value is stretched
template <int N, int Count>
LineFit search_line(const Tile<N>& tile, float top, const float (&steps)[Count], int rounds, bool offsets) {
    F32x16 low = tile.x[0], high = low;
    for (int i = 1; i < N; ++i) {
        low = min(low, tile.x[i]);
        high = max(high, tile.x[i]);
    }
    if (offsets) low = min(low, zero());
    const Whole levels(0, top);
    const F32x16 to_one = inverse(high - low);
    LineFit best = {broadcast(-1.0f), (high - low) * broadcast(1 / top), low};
    const auto try_line = [&](F32x16 inverse_scale, F32x16 origin) {
        const LineFit fit = tile.weighted ? fit_line<true>(tile, levels, inverse_scale, origin, offsets)
                                          : fit_line<false>(tile, levels, inverse_scale, origin, offsets);
        best.scale = select_greater(fit.gain, best.gain, fit.scale, best.scale);
        best.offset = select_greater(fit.gain, best.gain, fit.offset, best.offset);
        best.gain = max(fit.gain, best.gain);
    };
    for (const float step : steps) try_line(to_one * broadcast(top + step), low);
    for (int round = 0; round < rounds; ++round) try_line(inverse(best.scale), best.offset);
    return best;
}

// The codes of N values in one lane, as bytes.
template <int N>
struct Codes {
    alignas(64) float values[N][LANES];
    void set(int i, F32x16 codes) { store(values[i], codes); }
    void of_lane(int lane, uint8_t* out) const {
        for (int i = 0; i < N; ++i) out[i] = static_cast<uint8_t>(static_cast<int32_t>(values[i][lane]));
    }
};

}  // namespace
}  // namespace octavo
