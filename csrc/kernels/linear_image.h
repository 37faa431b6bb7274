// The activations as the linear kernels of all levels except AMX read them: int8 with one scale per unit of 32 k, in
// groups of rows.
//
// A group of r rows (ROW_GROUP, or the remaining rows in the last group) is one stream over the units. Each unit has
//   codes  int8 [r][32]      scales float [r]      sums float [r]: A of linear_format.h
//   pairs  int16 [2][r][2]   for each half unit the sums of a over k % 4 in {0, 1} and in {2, 3}
#pragma once

#include "linear_format.h"

namespace octavo {
namespace {

// ROW_GROUP: rows that a kernel processes at once. PACKED_ROWS: up to this many rows read the packed panel directly;
// for more, it is unpacked. WIDE_ZERO: subtracted from wide codes by terms (avx512: from their high nibble).
// WIDE_APART: wide codes have separate sums. SHORT_SUMS: products are added in int16, terms are pairs of int16 (for the
// sums of a over k % 4 in {0, 1} and {2, 3}) instead of int32, and codes above 15 without a zero point are summed over
// half a unit.
#if defined(OCTAVO_ISA_avx512vnni)
constexpr int ROW_GROUP = 8, PACKED_ROWS = 8, WIDE_ZERO = 128;
constexpr bool WIDE_APART = false, SHORT_SUMS = false;
using TileCode = uint8_t;
#elif defined(OCTAVO_ISA_avx512)
constexpr int ROW_GROUP = 8, PACKED_ROWS = 8, WIDE_ZERO = 8;
constexpr bool WIDE_APART = true, SHORT_SUMS = true;
using TileCode = uint8_t;
#elif defined(OCTAVO_ISA_avx2)
constexpr int ROW_GROUP = 4, PACKED_ROWS = 8, WIDE_ZERO = 0;
constexpr bool WIDE_APART = true, SHORT_SUMS = true;
using TileCode = uint8_t;
#elif defined(OCTAVO_NEON)
constexpr int ROW_GROUP = 4, PACKED_ROWS = 8, WIDE_ZERO = 0;
#if defined(OCTAVO_ISA_neon)
constexpr bool WIDE_APART = true, SHORT_SUMS = false;
#else
constexpr bool WIDE_APART = false, SHORT_SUMS = false;
#endif
using TileCode = int8_t;
#else
constexpr int ROW_GROUP = 4, PACKED_ROWS = 0, WIDE_ZERO = 0;
constexpr bool WIDE_APART = false, SHORT_SUMS = false;
using TileCode = int16_t;
#endif
// Integer scales of half units are multiplied in int32.
#if defined(OCTAVO_ISA_avx2) || defined(OCTAVO_NEON)
constexpr bool WHOLE_HALF_SCALES = true;
#else
constexpr bool WHOLE_HALF_SCALES = false;
#endif
#if defined(OCTAVO_ISA_avx512vnni)
constexpr bool KEEPS_GROUPS = true;
constexpr int MOST_PANELS = 2;  // multiplied at once
#else
constexpr bool KEEPS_GROUPS = false;
constexpr int MOST_PANELS = 1;
#endif
// Start value of odd sums of super-blocks. -1 allows negation by a NOT, which is free when the sum is joined to an even
// one.
#if defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512)
constexpr int ODD_START = -1;
#else
constexpr int ODD_START = 0;
#endif
// Wide codes of a tile are magnitudes with separate signs.
#if defined(OCTAVO_ISA_avx2)
constexpr bool SIGNS_APART = true;
#else
constexpr bool SIGNS_APART = false;
#endif
// The scalar kernel subtracts zero points while unpacking.
constexpr bool ZERO_BY_TERMS = PACKED_ROWS > 0;

// The properties of a format that products depend on once its codes are unpacked. Formats with equal ones share them.
enum class HalfScales : uint8_t { none, whole, floats };

template <bool Wide, bool InHalves, bool HasTerms, HalfScales HalfScales_, int Mins_, bool ScalesColumns>
struct SumForm {
    static constexpr bool is_wide = Wide, in_halves = InHalves, has_half_scales = HalfScales_ != HalfScales::none;
    static constexpr bool has_float_scales = HalfScales_ == HalfScales::floats;  // for half units
    static constexpr bool has_zero_terms = HasTerms;
    static constexpr int mins = Mins_;
    static constexpr bool scales_columns = ScalesColumns, sums_blocks = false;
    // 32-bit terms of each row and unit, stored with codes, scales and sums as [unit][term_count][r]: -zero * sum of a
    // for the unit or each of its halves, or the A_j of two minimums as floats.
    static constexpr int term_count = mins == 2 ? 2 : !has_zero_terms ? 0 : has_half_scales ? 2 : 1;
};

// As above, for super-blocks that are summed in integers. There is one sum per unit, or per half unit.
template <int Bits, bool InHalves, int Mins_>
struct BlockForm {
    static constexpr bool is_wide = false, has_half_scales = InHalves, has_float_scales = false;
    static constexpr bool in_halves = InHalves || (SHORT_SUMS && Bits > 4);
    static constexpr bool has_zero_terms = Mins_ == 0 && ZERO_BY_TERMS, scales_columns = false, sums_blocks = true;
    static constexpr int mins = Mins_, units = 8, zero = Mins_ == 0 ? 1 << (Bits - 1) : 0;
    static constexpr int sums = InHalves ? 16 : 8;  // per super-block
    static constexpr int largest_sum = (zero ? zero : (1 << Bits) - 1) * 127 * (InHalves ? 16 : 32);
    static constexpr int shift = largest_sum > 65535 ? 2 : largest_sum > 32767 ? 1 : 0;
    static constexpr int largest_scale = Bits == 3 ? 32 : InHalves ? 128 : 63;  // six bits in files, except for Q6_K
    static constexpr int scale_shift = Bits == 3 ? 8 : InHalves ? 5 : 7;
    static_assert(largest_sum >> shift <= INT16_MAX);
    static_assert(int64_t{largest_sum >> shift} * (largest_scale << scale_shift) * sums <= INT32_MAX);
    // 32-bit terms of each row and super-block, [term][r]: -zero * sum of a for each sum; M as pairs of int16 for every
    // two sums; B likewise for every two units; S. Room is allotted in whole terms per unit.
    static constexpr int multipliers_at = has_zero_terms ? sums : 0, mins_at = multipliers_at + sums / 2;
    static constexpr int scale_at = mins_at + (mins ? 4 : 0), term_count = scale_at / units + 1;
};
// Wide codes with integer scales would not fit into int16 sums.
template <typename F>
constexpr HalfScales half_scales_of() {
    if (!F::has_half_scales) return HalfScales::none;
    return WHOLE_HALF_SCALES && !F::is_wide && !F::has_e4m3_scales ? HalfScales::whole : HalfScales::floats;
}
template <typename F, bool SumsBlocks = F::sums_blocks>
struct FormOfFormat {
    using type =
        SumForm<F::is_wide && WIDE_APART, F::has_half_scales || (SHORT_SUMS && F::codes == Codes::plain && F::bits > 4),
                F::is_wide ? WIDE_ZERO != 0 : F::has_zero && ZERO_BY_TERMS, half_scales_of<F>(), F::mins,
                F::scales_columns>;
};
template <typename F>
struct FormOfFormat<F, true> {
    using type = BlockForm<F::bits, F::has_half_scales, F::mins>;
    static_assert(F::units == type::units);
};
template <typename F>
using FormOf = typename FormOfFormat<F>::type;

constexpr int ROW_UNIT_BYTES = 48;  // for one row and one unit

struct ImageGroup {
    uint8_t* data;
    int rows;

    uint8_t* unit(int u) const { return data + static_cast<int64_t>(u) * rows * ROW_UNIT_BYTES; }
    ImageGroup from(int u) const { return {unit(u), rows}; }
};
// The parts of a unit with r rows.
inline int8_t* image_codes(uint8_t* unit) { return reinterpret_cast<int8_t*>(unit); }
inline float* image_scales(uint8_t* unit, int r) { return reinterpret_cast<float*>(unit + 32 * r); }
inline float* image_sums(uint8_t* unit, int r) { return reinterpret_cast<float*>(unit + 36 * r); }
inline int16_t* image_pairs(uint8_t* unit, int r, int half) {
    return reinterpret_cast<int16_t*>(unit + (40 + 4 * half) * r);
}

// The code of values that are not finite; with the scale of its unit, the result is not finite either. -128 has no
// negation in a byte, and AVX2 negates activations for wide codes.
constexpr int NOT_FINITE = -127;

// The largest magnitude, compared as bits, so that NaN is the largest and reaches the scale.
struct UnitScale {
    float scale, inverse;
};
inline UnitScale unit_scale(uint32_t largest_bits) {
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    if (largest < 1e-30f) return {0.0f, 0.0f};  // its inverse could be infinite
    return {largest / 127.0f, 127.0f / largest};
}

#if defined(__AVX2__)

inline void quantize_unit(const float* x, uint8_t* unit, int row, int r) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
    const auto magnitude = [&](int i) { return _mm256_castps_si256(_mm256_and_ps(v[i], mask)); };
    const __m256i m =
        _mm256_max_epi32(_mm256_max_epi32(magnitude(0), magnitude(1)), _mm256_max_epi32(magnitude(2), magnitude(3)));
    __m128i n = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0x4e));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0xb1));
    const UnitScale s = unit_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(n)));
    const __m256 inverse = _mm256_set1_ps(s.inverse);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    const __m256i ab = _mm256_packs_epi32(q[0], q[1]), cd = _mm256_packs_epi32(q[2], q[3]);
    const __m256i saturated = _mm256_max_epi8(_mm256_packs_epi16(ab, cd), _mm256_set1_epi8(NOT_FINITE));
    const __m256i a = _mm256_permutevar8x32_epi32(saturated, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(unit + 32 * row), a);
    // 16-bit lanes: quad 0 low pair, high pair, quad 1 ...; one half unit per 128-bit lane
    __m256i p = _mm256_maddubs_epi16(_mm256_set1_epi8(1), a);
    p = _mm256_add_epi16(p, _mm256_shuffle_epi32(p, 0x4e));
    p = _mm256_add_epi16(p, _mm256_shuffle_epi32(p, 0xb1));
    const int half0 = _mm256_extract_epi32(p, 0), half1 = _mm256_extract_epi32(p, 4);
    std::memcpy(image_pairs(unit, r, 0) + 2 * row, &half0, 4);
    std::memcpy(image_pairs(unit, r, 1) + 2 * row, &half1, 4);
    const int sum = static_cast<int16_t>(half0) + (half0 >> 16) + static_cast<int16_t>(half1) + (half1 >> 16);
    image_scales(unit, r)[row] = s.scale;
    image_sums(unit, r)[row] = s.scale * static_cast<float>(sum);
}

#elif defined(OCTAVO_NEON)

inline void quantize_unit(const float* x, uint8_t* unit, int row, int r) {
    const F32x16 v[2] = {load(x), load(x + 16)};
    const auto magnitude = [&](int i) { return vreinterpretq_u32_f32(vabsq_f32(v[i / 4].v[i % 4])); };
    uint32x4_t m = magnitude(0);
    for (int i = 1; i < 8; ++i) m = vmaxq_u32(m, magnitude(i));
    const UnitScale s = unit_scale(vmaxvq_u32(m));
    const auto rounded = [&](int i) {
        const float32x4_t f = vmulq_n_f32(v[i / 4].v[i % 4], s.inverse);
        const uint32x4_t is_number = vcaleq_f32(f, vdupq_n_f32(127.5f));
        return vmovn_s32(vbslq_s32(is_number, vcvtnq_s32_f32(f), vdupq_n_s32(NOT_FINITE)));
    };
    int sum = 0;
    for (int half = 0; half < 2; ++half) {
        const int16x8_t low = vcombine_s16(rounded(4 * half), rounded(4 * half + 1));
        const int16x8_t high = vcombine_s16(rounded(4 * half + 2), rounded(4 * half + 3));
        const int8x16_t a = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
        vst1q_s8(image_codes(unit) + 32 * row + 16 * half, a);
        // Lanes: quad 0 low pair, high pair, quad 1 ...
        const int16x8_t p = vpaddlq_s8(a);
        const int16x4_t q = vadd_s16(vget_low_s16(p), vget_high_s16(p));
        const int16x4_t pairs = vadd_s16(q, vext_s16(q, q, 2));
        int16_t* const out = image_pairs(unit, r, half) + 2 * row;
        out[0] = vget_lane_s16(pairs, 0);
        out[1] = vget_lane_s16(pairs, 1);
        sum += out[0] + out[1];
    }
    image_scales(unit, r)[row] = s.scale;
    image_sums(unit, r)[row] = s.scale * static_cast<float>(sum);
}

#else

inline void quantize_unit(const float* x, uint8_t* unit, int row, int r) {
    uint32_t largest = 0;
    for (int i = 0; i < UNIT_K; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const UnitScale s = unit_scale(largest);
    int sums[4] = {};
    for (int i = 0; i < UNIT_K; ++i) {
        const float v = x[i] * s.inverse;
        const int a = v >= -127.5f && v <= 127.5f ? static_cast<int>(__builtin_rintf(v)) : NOT_FINITE;
        image_codes(unit)[32 * row + i] = static_cast<int8_t>(a);
        sums[i / 16 * 2 + i / 2 % 2] += a;
    }
    for (int i = 0; i < 4; ++i) image_pairs(unit, r, i / 2)[2 * row + i % 2] = static_cast<int16_t>(sums[i]);
    image_scales(unit, r)[row] = s.scale;
    image_sums(unit, r)[row] = s.scale * static_cast<float>(sums[0] + sums[1] + sums[2] + sums[3]);
}

#endif

// All rows of a step's activations. Groups are a fixed distance apart.
struct Image {
    uint8_t* data;
    int32_t rows, units;

    static constexpr int64_t SLACK_BYTES = 0;
    static int64_t bytes(int64_t rows, int64_t k) { return rows * (k / UNIT_K) * ROW_UNIT_BYTES; }
    ImageGroup group(int32_t g) const {
        const int32_t first = g * ROW_GROUP;
        const int count = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        return {data + static_cast<int64_t>(first) * units * ROW_UNIT_BYTES, count};
    }
    // order: the columns of x in the order of the codes, or null.
    void quantize_row(const float* x, int32_t row, const int32_t* order) const {
        const ImageGroup g = group(row / ROW_GROUP);
        for (int u = 0; u < units; ++u) {
            float gathered[UNIT_K];
            for (int i = 0; order && i < UNIT_K; ++i) gathered[i] = x[order[u * UNIT_K + i]];
            quantize_unit(order ? gathered : x + u * UNIT_K, g.unit(u), row % ROW_GROUP, g.rows);
        }
    }
    // Writes one unit of a row.
    void write_unit(F32x16 low, F32x16 high, int32_t row, int u) const {
        const ImageGroup g = group(row / ROW_GROUP);
        float x[UNIT_K];
        store(x, low);
        store(x + 16, high);
        quantize_unit(x, g.unit(u), row % ROW_GROUP, g.rows);
    }
};

// Two 16-bit numbers in the form that vpmaddwd reads.
constexpr int32_t pair_of(int low, int high) {
    return static_cast<int32_t>((low & 0xffff) | static_cast<uint32_t>(high) << 16);
}

inline int32_t zero_term(int zero, int low, int high, int start = 0) {
    if (!SHORT_SUMS) return start - zero * (low + high);
    return pair_of(start - zero * low, -zero * high);
}

// Writes the terms of one group. Returns their end.
template <typename Form>
inline int32_t* write_unit_terms(ImageGroup g, int units, [[maybe_unused]] int zero, int32_t* out) {
    const int r = g.rows;
    for (int u = 0; u < units && Form::term_count > 0; ++u, out += Form::term_count * r) {
        uint8_t* const unit = g.unit(u);
        const int16_t *p0 = image_pairs(unit, r, 0), *p1 = image_pairs(unit, r, 1);
        for (int i = 0; i < r; ++i) {
            if constexpr (Form::mins == 2) {
                const float scale = image_scales(unit, r)[i];
                const float sums[2] = {scale * static_cast<float>(p0[2 * i] + p0[2 * i + 1]),
                                       scale * static_cast<float>(p1[2 * i] + p1[2 * i + 1])};
                std::memcpy(out + i, sums, 4);
                std::memcpy(out + r + i, sums + 1, 4);
            } else if constexpr (Form::term_count == 2) {
                out[i] = zero_term(zero, p0[2 * i], p0[2 * i + 1]);
                out[r + i] = zero_term(zero, p1[2 * i], p1[2 * i + 1]);
            } else {
                out[i] = zero_term(zero, p0[2 * i] + p1[2 * i], p0[2 * i + 1] + p1[2 * i + 1]);
            }
        }
    }
    return out;
}

}  // namespace
}  // namespace octavo
