// Blocks of 32 values with one scale each (Q4_0 to Q8_0, IQ4_NL, MXFP4), and the ternary types.
#pragma once

#include "tile.h"

namespace octavo {
namespace {

constexpr int BLOCK = 32;

// The codes of one block per lane.
using BlockCodes = F32x16[BLOCK];

// What follows a block's scales, for all lanes at once: two-byte words, as floats.
struct CodeBytes {
    alignas(64) float words[16][LANES];
    int count = 0;
    void put(F32x16 word) { store(words[count++], word); }
    void of_lane(int lane, uint8_t* out) const {
        for (int i = 0; i < count; ++i) {
            const uint16_t word = static_cast<uint16_t>(static_cast<int32_t>(words[i][lane]));
            std::memcpy(out + 2 * i, &word, 2);
        }
    }
};

// codes: 0 to 15, the first sixteen in the low halves of bytes
inline void put_nibbles(const BlockCodes& codes, CodeBytes& out) {
    const auto byte = [&](int i) { return fma(codes[16 + i], broadcast(16.0f), codes[i]); };
    for (int i = 0; i < 16; i += 2) out.put(fma(byte(i + 1), broadcast(256.0f), byte(i)));
}
// codes: 0 to 31; reduced to their nibbles
inline void put_fifth_bits(BlockCodes& codes, CodeBytes& out) {
    for (int half = 0; half < BLOCK; half += 16) {
        F32x16 bits = zero();
        for (int i = 0; i < 16; ++i) {
            F32x16& code = codes[half + i];
            bits = bits + select_greater(code, broadcast(15.5f), broadcast(static_cast<float>(1 << i)), zero());
            code = select_greater(code, broadcast(15.5f), code - broadcast(16.0f), code);
        }
        out.put(bits);
    }
}
// values: -127 to 127
inline void put_signed(const BlockCodes& values, CodeBytes& out) {
    const auto byte = [&](int i) {
        return select_greater(zero(), values[i], values[i] + broadcast(256.0f), values[i]);
    };
    for (int i = 0; i < BLOCK; i += 2) out.put(fma(byte(i + 1), broadcast(256.0f), byte(i)));
}

// Candidate levels for the farthest value. The first is the one that rounding alone would choose.
constexpr float REACHES_4[] = {-8.0f, -7.3f, -7.7f, -8.4f, -8.8f};
constexpr float MORE_REACHES_4[] = {-8.0f, -6.4f, -6.7f, -7.0f, -7.2f, -7.4f, -7.6f, -7.8f, -8.1f, -8.2f, -8.3f,
                                    -8.5f, -8.7f, -8.9f, 5.8f,  6.2f,  6.5f,  6.8f,  7.0f,  7.2f,  7.4f,  7.6f};
constexpr float REACHES_5[] = {-16.0f, -15.2f, -15.6f, -16.4f};
constexpr float MORE_REACHES_5[] = {-16.0f, -14.4f, -14.8f, -15.0f, -15.2f, -15.4f, -15.6f, -15.8f, -16.2f, -16.3f,
                                    -16.4f, -16.6f, -16.8f, 14.2f,  14.6f,  14.9f,  15.1f,  15.3f,  15.5f};
constexpr float REACHES_8[] = {-127.0f, -126.6f, -126.3f, -125.6f, -127.3f};
constexpr float REACHES_CURVE[] = {-127.0f, -109.0f, -113.0f, -117.0f, -120.0f, -123.0f, -130.0f, -134.0f,
                                   113.0f,  96.0f,   100.0f,  104.0f,  107.0f,  110.0f,  117.0f,  121.0f};
constexpr float STEPS_FEW[] = {-0.2f, 0.6f};
constexpr float MORE_STEPS_4[] = {0.0f, -1.4f, -1.1f, -0.8f, -0.6f, -0.4f, -0.2f, 0.2f, 0.4f, 0.6f,
                                  0.8f, 1.0f,  1.2f,  1.5f,  1.8f,  2.2f,  2.6f,  3.0f, 3.5f};

// Rounds the scales of a tile to float16 and computes codes for them.
template <class Levels>
F32x16 code_by_scale(const Tile<BLOCK>& tile, const Levels& levels, F32x16 scale, BlockCodes& codes) {
    const F32x16 half = rounded_half(scale), to_levels = inverse(half);
    for (int i = 0; i < BLOCK; ++i) codes[i] = levels.code(levels.nearest(tile.x[i] * to_levels));
    return half;
}

// The part of a block after its scale
enum class Flat { q4, q5, q8, curve };

template <Flat kind>
void put_codes(BlockCodes& codes, CodeBytes& out) {
    if (kind == Flat::q8) {
        for (int i = 0; i < BLOCK; ++i) codes[i] = codes[i] - broadcast(127.0f);
        put_signed(codes, out);
    } else {
        if (kind == Flat::q5) put_fifth_bits(codes, out);
        put_nibbles(codes, out);
    }
}

template <Flat kind>
F32x16 flat_scale(const Tile<BLOCK>& tile, const Whole& levels, bool weighted) {
    if (kind == Flat::q4)
        return weighted ? search_scale(tile, levels, MORE_REACHES_4, 2) : search_scale(tile, levels, REACHES_4, 1);
    if (kind == Flat::q5)
        return weighted ? search_scale(tile, levels, MORE_REACHES_5, 2) : search_scale(tile, levels, REACHES_5, 1);
    return search_scale(tile, levels, REACHES_8, 0);
}

template <Flat kind>
void quantize_scaled(const QuantizeRows& rows) {
    constexpr int bytes = kind == Flat::q5 ? 22 : kind == Flat::q8 ? 34 : 18;
    constexpr float low = kind == Flat::q5 ? -16.0f : kind == Flat::q8 ? -127.0f : -8.0f;
    for_each_tile<BLOCK>(rows, [&](const Lanes& lanes, int64_t first, int count) {
        Tile<BLOCK> tile;
        BlockCodes codes;
        CodeBytes coded;
        load_tile(lanes, tile);
        F32x16 scale;
        if constexpr (kind == Flat::curve) {
            scale = code_by_scale(tile, Curve(), search_scale(tile, Curve(), REACHES_CURVE, 2), codes);
        } else {
            const Whole levels(low, kind == Flat::q8 ? 127.0f : -low - 1);
            scale = code_by_scale(tile, levels, flat_scale<kind>(tile, levels, lanes.w[0] != nullptr), codes);
        }
        put_codes<kind>(codes, coded);
        uint16_t halves[LANES];
        store_f16(halves, scale);
        for (int lane = 0; lane < count; ++lane) {
            uint8_t* const block = rows.out + (first + lane) * bytes;
            std::memcpy(block, halves + lane, 2);
            coded.of_lane(lane, block + 2);
        }
    });
}

template <Flat kind>
void quantize_line(const QuantizeRows& rows) {
    constexpr int bytes = kind == Flat::q5 ? 24 : 20;
    constexpr float top = kind == Flat::q5 ? 31.0f : 15.0f;
    for_each_tile<BLOCK>(rows, [&](const Lanes& lanes, int64_t first, int count) {
        Tile<BLOCK> tile;
        BlockCodes codes;
        CodeBytes coded;
        load_tile(lanes, tile);
        const LineFit fit =
            lanes.w[0] ? search_line(tile, top, MORE_STEPS_4, 3, false) : search_line(tile, top, STEPS_FEW, 1, false);
        const F32x16 scale = rounded_half(fit.scale), offset = rounded_half(fit.offset), to_levels = inverse(scale);
        const Whole levels(0, top);
        for (int i = 0; i < BLOCK; ++i) codes[i] = levels.nearest((tile.x[i] - offset) * to_levels);
        put_codes<kind>(codes, coded);
        uint16_t scales[LANES], offsets[LANES];
        store_f16(scales, scale);
        store_f16(offsets, offset);
        for (int lane = 0; lane < count; ++lane) {
            uint8_t* const block = rows.out + (first + lane) * bytes;
            std::memcpy(block, scales + lane, 2);
            std::memcpy(block + 2, offsets + lane, 2);
            coded.of_lane(lane, block + 4);
        }
    });
}

// The exponent of the largest power of two up to a positive float; -127 for subnormal numbers.
inline int exponent_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<int>(bits >> 23 & 255) - 127;
}

// MXFP4: a scale is a power of two, so only three of them can be best. `DoubledE2M1` has doubled values, so a block
// with the stored exponent e has steps of 2^(e - 128).
inline void quantize_mxfp4(const QuantizeRows& rows) {
    for_each_tile<BLOCK>(rows, [&](const Lanes& lanes, int64_t first, int count) {
        Tile<BLOCK> tile;
        BlockCodes codes;
        CodeBytes coded;
        load_tile(lanes, tile);
        const DoubledE2M1 levels;
        alignas(64) float far[LANES], exponents[LANES];
        store(far, abs(farthest(tile)));
        for (int lane = 0; lane < LANES; ++lane) {
            const int exponent = exponent_of(far[lane]) - 3;  // puts the farthest value between 8 and 16
            exponents[lane] = static_cast<float>(exponent < -124 ? -124 : exponent > 124 ? 124 : exponent);
        }
        F32x16 best = load(exponents), least = broadcast(3.4e38f);
        for (int step = -1; step <= 1; ++step) {
            const F32x16 exponent = load(exponents) + broadcast(static_cast<float>(step));
            const F32x16 scale = scale_pow2(broadcast(1.0f), exponent);
            const F32x16 to_levels = scale_pow2(broadcast(1.0f), zero() - exponent);
            F32x16 error = zero();
            for (int i = 0; i < BLOCK; ++i) {
                const F32x16 rest = tile.x[i] - scale * levels.nearest(tile.x[i] * to_levels);
                error = fma(tile.w[i] * rest, rest, error);
            }
            best = select_greater(least, error, exponent, best);
            least = min(error, least);
        }
        const F32x16 to_levels = scale_pow2(broadcast(1.0f), zero() - best);
        for (int i = 0; i < BLOCK; ++i) codes[i] = levels.code(levels.nearest(tile.x[i] * to_levels));
        put_nibbles(codes, coded);
        store(exponents, best);
        for (int lane = 0; lane < count; ++lane) {
            uint8_t* const block = rows.out + (first + lane) * 17;
            block[0] = static_cast<uint8_t>(static_cast<int>(exponents[lane]) + 128);
            coded.of_lane(lane, block + 1);
        }
    });
}

// Ternary values: codes 0, 1 and 2 for -scale, 0 and scale. The scale is the magnitude of the farthest value.
inline float ternary_codes(const float* x, uint8_t* codes) {
    float scale = 0;
    for (int i = 0; i < 256; ++i) scale = x[i] > scale ? x[i] : -x[i] > scale ? -x[i] : scale;
    for (int i = 0; i < 256; ++i) codes[i] = x[i] > scale / 2 ? 2 : x[i] < -scale / 2 ? 0 : 1;
    return scale;
}

// A byte stores up to five base-3 digits, as a fraction of 3^5 scaled to 256 and rounded up.
inline void put_trits(const uint8_t* codes, int digits, int bytes, uint8_t* out) {
    for (int i = 0; i < bytes; ++i) {
        int number = 0;
        for (int digit = 0; digit < 5; ++digit) number = 3 * number + (digit < digits ? codes[digit * bytes + i] : 0);
        out[i] = static_cast<uint8_t>((number * 256 + 242) / 243);
    }
}

inline void quantize_tq1_0(const QuantizeRows& rows) {
    uint8_t codes[256], *out = rows.out;
    for (int64_t at = 0; at < rows.rows * rows.k; at += 256, out += 54) {
        put_half(out + 52, ternary_codes(rows.x + at, codes));
        put_trits(codes, 5, 32, out);
        put_trits(codes + 160, 5, 16, out + 32);
        put_trits(codes + 240, 4, 4, out + 48);
    }
}

// Two bits per code: value `32 * j + i` of each half is in byte i, at bit 2 * j.
inline void put_pairs(const uint8_t* codes, uint8_t* out) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i) {
            const uint8_t* const c = codes + 128 * half + i;
            out[32 * half + i] =
                static_cast<uint8_t>((c[0] & 3) | (c[32] & 3) << 2 | (c[64] & 3) << 4 | (c[96] & 3) << 6);
        }
}

inline void quantize_tq2_0(const QuantizeRows& rows) {
    uint8_t codes[256], *out = rows.out;
    for (int64_t at = 0; at < rows.rows * rows.k; at += 256, out += 66) {
        put_half(out + 64, ternary_codes(rows.x + at, codes));
        put_pairs(codes, out);
    }
}

}  // namespace
}  // namespace octavo
