// The packed quantized types as the linear kernels read them, and the arithmetic that all levels except AMX follow.
//
// For output column n and one row of activations, quantized to int8 a with one scale per unit of 32 k
//     s_a = max|x| / 127,  a = round to nearest even(x * (127 / max|x|)),  A = s_a * float(sum of a)
// units are processed in increasing order, with y starting at 0. For each unit
//     I = sum over half units j of scale_j * sum over k of (u - zero) * a       exact in int32
//     y = fma(float(I), s * s_a, y)
//     y = fma(m, A, y)                      types with one minimum per unit
//     y = fma(m_j, A_j, y), j = 0, 1        types with a minimum for each half unit
// where u is the code or its entry in the table, and scale_j is 1 unless half units have scales. If these are E4M3,
//     I = fma(float(I_1), scale_1, float(I_0) * scale_0),  I_j the sum over half unit j; rounded once
// Bytes with one scale for each whole column: y = fma(float(I), s_a, y) for each unit, and y * s at the end.
//
// Super-blocks with integer scales (Q3_K, Q4_K, Q5_K, Q6_K) are summed in integers, because applying a float scale and
// a minimum for each unit takes a third as long as its products. For a row, S is the largest s_a of the super-block.
// For each unit u
//     M_u = min(round to nearest even(s_a * (32768 / S)), 32767),  B_u = (M_u * sum of a + 2048) >> 12
// There is one sum i per unit, or per half unit if these have scales c_i. Odd sums are negated, so that their shift
// rounds the other way and leaves no bias. For a column with d and m of its super-block (floats) and minimums n_u
//     f_i = (+-c_i * 2^scale_shift * M_u + 2^14) >> 15,  p_i = (+- sum over k of (code - zero) * a) >> shift
//     I = sum over i of f_i * p_i,  J = sum over u of n_u * B_u      exact in int32
//     t = float(I) * (d * 2^(shift - scale_shift))
//     t = fma(float(J), m / 8, t)      types with minimums
//     y = fma(t, S, y)
// shift and scale_shift (linear_image.h) are chosen so that p_i fits into int16, and I into int32. All these roundings
// together are less than a hundredth of the rounding of the activations.
//
// Dense types: y = fma(w, x, y) in increasing k. Every instruction set does exactly this, for any number of rows and
// threads, so all results agree bit for bit. Only AMX multiplies quantized weights as bfloat16 (linear_amx.h): int8
// sums would have to be scaled for each unit, which takes longer than the products of its tiles. Its results have
// different bits, but they do not depend on the batch or the number of threads either.
//
// Groups with zero points z have the minimum m = -(s * z), which is exact if s is a float16: 11 and 8 bits. Codes of 8
// bits are stored as c - 128 and their z as z - 128; the minimum of a group becomes fma(s, 128, minimum).
#pragma once

#include "packed_weight.h"
#include "simd.h"
#include "unroll.h"

namespace octavo {
namespace {

constexpr int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// PanelTraits as a type, so that templates over it have one instantiation for equal traits.
template <Codes Codes_, int32_t Bits, int32_t BlockK, Scales Scales_, Mins Mins_>
struct Format {
    static constexpr PanelTraits traits = {Codes_, Bits, BlockK, Scales_, Mins_};
    static constexpr Codes codes = Codes_;
    static constexpr Scales scales = Scales_;
    static constexpr int bits = Bits, units = octavo::units(traits);
    static constexpr int unit_bytes = octavo::unit_bytes(traits), code_bytes = octavo::code_bytes(traits);
    static constexpr int header_bytes = octavo::header_bytes(traits), block_bytes = octavo::block_bytes(traits);
    static constexpr bool is_dense = octavo::is_dense(traits), is_wide = octavo::is_wide(traits);
    static constexpr bool is_grouped = octavo::is_grouped(traits), sums_blocks = octavo::sums_blocks(traits);
    static constexpr bool has_table = octavo::has_table(traits), has_zero = octavo::has_zero(traits);
    static constexpr bool has_half_scales = octavo::has_half_scales(traits);
    static constexpr bool has_e4m3_scales = octavo::has_e4m3_scales(traits), is_grid = octavo::is_grid(traits);
    static constexpr bool has_byte_mins = Mins_ == Mins::u8_per_unit, has_half_mins = Mins_ == Mins::u4_per_half_unit;
    static constexpr int mins = Mins_ == Mins::none ? 0 : has_half_mins ? 2 : 1;  // per unit
    // Whether one scale may serve a whole column, and then be applied to the finished sum (OfColumns).
    static constexpr bool may_scale_columns = octavo::may_scale_columns(traits);
    static constexpr bool scales_columns = false;
    // The planes of the codes, the bit of a code in the plane of single bits, and the position of that plane in a unit.
    static constexpr bool has_pairs = !is_grid && (bits == 2 || bits == 3), has_nibbles = bits == 4 || bits == 5;
    static constexpr bool has_triples = bits == 6, has_bits = !is_grid && (bits == 1 || bits == 3 || bits == 5);
    static constexpr int bits_place = bits == 1 ? 1 : bits - 1, bits_offset = QUAD_BYTES * (bits - 1);
    // The signs of a grid, which are the last plane of a unit.
    static constexpr bool has_signs = is_grid && bits > 1;
    static constexpr int signs_offset = code_bytes - QUAD_BYTES;
};

template <int I>
using FormatOf = Format<WEIGHT_TYPES[I].traits.codes, WEIGHT_TYPES[I].traits.bits, WEIGHT_TYPES[I].traits.block_k,
                        WEIGHT_TYPES[I].traits.scales, WEIGHT_TYPES[I].traits.mins>;

// The format of a matrix with one scale for each column.
template <typename F>
struct OfColumns : F {
    static constexpr bool scales_columns = true;
};

// Calls f with the Format of `traits`, which must be those of a row of WEIGHT_TYPES.
template <int I = 0, typename F>
inline void with_format(const PanelTraits& traits, const F& f) {
    if constexpr (I < NUM_WEIGHT_TYPES) {
        if (traits == FormatOf<I>::traits) return f(FormatOf<I>{});
        with_format<I + 1>(traits, f);
    }
}

#if defined(__AVX512F__)
inline F32x16 load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32x16 load_i8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif defined(__AVX2__)
inline F32x16 load_u8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32x16 load_i8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
#elif defined(OCTAVO_NEON)
inline F32x16 load_u8(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_high_u8(x);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))}};
}
inline F32x16 load_i8(const uint8_t* p) {
    const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))}};
}
#else
inline F32x16 load_u8(const uint8_t* p) {
    return each_lane([&](int i) { return static_cast<float>(p[i]); });
}
inline F32x16 load_i8(const uint8_t* p) {
    return each_lane([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
#endif

inline F32x16 load_halves(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }

// 2^(e - 128). Exponents 0 and 1 give subnormals.
inline F32x16 load_e8m0(const uint8_t* p) {
    uint32_t bits[PANEL_COLS];
    for (int i = 0; i < PANEL_COLS; ++i) {
        const uint32_t e = p[i];
        bits[i] = e < 2 ? 0x00200000u * (e + 1) : (e - 1) << 23;
    }
    float t[PANEL_COLS];
    std::memcpy(t, bits, sizeof(t));
    return load(t);
}

// A shift turns E4M3 into float16 that is too small by this factor, so scales are multiplied by it.
constexpr float E4M3_FACTOR = 256.0f;

#if defined(__AVX2__)
inline F32x16 load_e4m3(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i shifted = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
    // The shift copied the sign into the highest bit of the exponent; clear it.
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80)));
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(halves)};
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}
#else
inline F32x16 load_e4m3(const uint8_t* p) {
    uint16_t halves[PANEL_COLS];
    for (int i = 0; i < PANEL_COLS; ++i) halves[i] = static_cast<uint16_t>((p[i] & 128) << 8 | (p[i] & 127) << 7);
    return load_f16(halves);
}
#endif

// 2^(e - 127), e from 1 to 254: the exponent of a float.
#if defined(__AVX512F__)
inline F32x16 load_exponents(const uint8_t* p) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
#elif defined(__AVX2__)
inline F32x16 load_exponents(const uint8_t* p) {
    const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const auto shifted = [](__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(x), 23)); };
    return {shifted(e), shifted(_mm_srli_si128(e, 8))};
}
#else
inline F32x16 load_exponents(const uint8_t* p) {
    float t[PANEL_COLS];
    for (int i = 0; i < PANEL_COLS; ++i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 23;
        std::memcpy(t + i, &bits, sizeof(bits));
    }
    return load(t);
}
#endif

#if defined(__AVX512F__)
inline F32x16 load_high_nibbles(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(x), 4))};
}
#else
inline F32x16 load_high_nibbles(const uint8_t* p) {
    uint8_t t[16];
    for (int i = 0; i < 16; ++i) t[i] = p[i] >> 4;
    return load_u8(t);
}
#endif

// scale_j of one column, for E4M3 divided by E4M3_FACTOR. scales: the 16 bytes of the half unit.
template <typename F>
inline auto half_scale(const uint8_t* scales, [[maybe_unused]] int half, int column) {
    if constexpr (F::has_e4m3_scales) {
        float each[PANEL_COLS];
        store(each, load_e4m3(scales));
        return each[column];
    } else {
        if constexpr (!F::has_half_scales) return 1;
        if constexpr (F::scales == Scales::u4_per_half_unit) return scales[column] & 15;
        if constexpr (F::scales == Scales::odd_u4_per_half_unit) return 2 * (scales[column] >> (4 * half) & 15) + 1;
        return static_cast<int>(static_cast<int8_t>(scales[column]));
    }
}

// The index of the vector for quads 2 pair and 2 pair + 1, or of the vector for one of them (grids of four values).
template <typename F>
inline int grid_index(const uint8_t* codes, int pair, int odd, int column) {
    const uint8_t* const rest = codes + 4 * PANEL_COLS;
    const int at = PANEL_COLS * pair + column;
    if constexpr (F::bits == 3) return odd ? rest[at] : codes[at];
    if constexpr (F::bits == 2) return codes[at] | (rest[column] >> (2 * pair) & 3) << 8;
    return codes[at] | (rest[PANEL_COLS * (pair / 2) + column] >> (4 * (pair % 2)) & 15) << 8;
}

template <typename F>
inline int grid_value(const int8_t* grid, const uint8_t* codes, int k, int column) {
    const int quad = k / 4, index = grid_index<F>(codes, quad / 2, quad % 2, column);
    const int value = F::bits == 3 ? grid[4 * index + k % 4] : grid[8 * index + k % 8];
    if constexpr (!F::has_signs) return value;
    const int place = 4 * column + k % 4;
    return codes[F::signs_offset + 8 * quad + place / 8] >> (place % 8) & 1 ? -value : value;
}

// The code of one value, looked up and signed if the format requires it. k and column are within the unit.
template <typename F>
inline int unit_code([[maybe_unused]] const int8_t* table, const uint8_t* codes, int k, int column) {
    if constexpr (F::is_grid) return grid_value<F>(table, codes, k, column);
    const int quad = k / 4, byte = column * 4 + k % 4;
    if constexpr (F::bits == 8) return static_cast<int8_t>(codes[64 * quad + byte]);
    if constexpr (F::has_triples) {
        const uint8_t* const triple = codes + TRIPLE_BYTES * (quad / 4) + byte;
        if (quad % 4 < 3) return triple[64 * (quad % 4)] & 63;
        return triple[0] >> 6 | triple[64] >> 6 << 2 | triple[128] >> 6 << 4;
    }
    int u = 0;
    if constexpr (F::has_nibbles) u = codes[64 * (quad / 2) + byte] >> (4 * (quad % 2)) & 15;
    if constexpr (F::has_table) return table[u];
    if constexpr (F::has_pairs) u = codes[64 * (quad / 4) + byte] >> (2 * (quad % 4)) & 3;
    if constexpr (F::has_bits) u |= (codes[F::bits_offset + byte] >> quad & 1) << F::bits_place;
    return u;
}

// A panel, with the properties in which matrices of equal traits may differ.
struct Panel {
    const uint8_t* data;
    const WeightType& type;
    const Groups& groups;
};

// The sizes of a super-block: constants, or the group sizes of a matrix.
template <typename F, bool IsGrouped = F::is_grouped>
struct BlockSizes {
    static constexpr int units = F::units, header_bytes = F::header_bytes, block_bytes = F::block_bytes;
    explicit BlockSizes(const Groups&) {}
};
template <typename F>
struct BlockSizes<F, true> {
    int units, header_bytes;
    int64_t block_bytes;
    bool has_float_scales, has_zeros;
    explicit BlockSizes(const Groups& g)
        : units(g.k / UNIT_K),
          header_bytes(octavo::header_bytes(g)),
          block_bytes(header_bytes + static_cast<int64_t>(units) * F::unit_bytes),
          has_float_scales(g.scale_bytes == 4),
          has_zeros(g.min_bytes == 1) {}
};

// Walks over `count` units of a panel. What all units of a super-block share is converted only once.
template <typename F>
struct UnitCursor {
    const uint8_t* header;
    int unit;  // within the super-block

    UnitCursor(const Panel& panel, int first, int count)
        : header(panel.data),
          unit(F::units == 1 ? 0 : first),
          left_(count),
          sizes_(panel.groups),
          factor_(F::is_grid ? 1.0f / panel.type.table_factor : 1.0f) {
        header += first / sizes_.units * static_cast<int64_t>(sizes_.block_bytes);
        if (F::units != 1) unit = first % sizes_.units;
        load_header();
    }
    const uint8_t* codes() const { return header + sizes_.header_bytes + static_cast<int64_t>(unit) * F::unit_bytes; }
    bool is_done() const { return left_ <= 0; }
    // The codes of the next unit, or null.
    const uint8_t* next_codes() const {
        if (left_ <= 1) return nullptr;
        return unit + 1 == sizes_.units ? header + sizes_.block_bytes + sizes_.header_bytes : codes() + F::unit_bytes;
    }
    // The address of the 16 bytes of scale_j.
    const uint8_t* half_scale_bytes(int half) const {
        if constexpr (F::has_e4m3_scales) return codes() + F::code_bytes + PANEL_COLS * half;
        const int at = F::scales == Scales::odd_u4_per_half_unit ? unit : 2 * unit + half;
        return header + byte_scales_at(F::traits) + PANEL_COLS * at;
    }
    // s of the unit, for 16 columns.
    F32x16 scales() const {
        [[maybe_unused]] const uint8_t* const bytes = header + byte_scales_at(F::traits) + PANEL_COLS * unit;
        if constexpr (F::scales == Scales::u8_per_unit)
            return scale_ * load_u8(bytes);
        else if constexpr (F::scales == Scales::i8_per_unit)
            return scale_ * load_i8(bytes);
        else if constexpr (F::scales == Scales::group_exponents)
            return scale_ * load_exponents(codes() + F::code_bytes);
        else
            return scale_;
    }
    // d and m of the super-block.
    F32x16 block_scale() const { return scale_; }
    F32x16 block_min() const { return min_; }
    // m of the unit, or m_j for j = `half`.
    F32x16 mins([[maybe_unused]] int half) const {
        if constexpr (F::has_byte_mins)
            return min_ * load_u8(header + byte_mins_at(F::traits) + PANEL_COLS * unit);
        else if constexpr (F::has_half_mins)
            return min_ * load_high_nibbles(half_scale_bytes(half));
        else
            return min_;
    }
    // After the last unit of a super-block, moves `header` to the next one, if there is one.
    __attribute__((always_inline)) void next() {
        --left_;
        if (F::units == 1 || ++unit == sizes_.units) {
            unit = 0;
            header += sizes_.block_bytes;
            if (left_ > 0) load_header();
        }
    }

  private:
    int left_;
    BlockSizes<F> sizes_;
    float factor_;
    F32x16 scale_, min_;

    __attribute__((always_inline)) void load_header() {
        if constexpr (F::is_grouped)
            load_group();
        else
            load_block();
    }
    void load_group() {
        const auto load_stored = [&](const uint8_t* p) {
            return sizes_.has_float_scales ? load(reinterpret_cast<const float*>(p)) : load_halves(p);
        };
        scale_ = F::has_e4m3_scales || F::scales == Scales::group_exponents
                     ? load(reinterpret_cast<const float*>(header))
                     : load_stored(header);
        if constexpr (F::has_e4m3_scales) scale_ = scale_ * broadcast(E4M3_FACTOR);
        if constexpr (F::mins > 0) {
            const uint8_t* const at = header + PANEL_COLS * (sizes_.has_float_scales ? 4 : 2);
            if (sizes_.has_zeros)
                min_ = broadcast(0.0f) - scale_ * (F::bits == 8 ? load_i8(at) : load_u8(at));
            else
                min_ = F::bits == 8 ? fma(scale_, broadcast(128.0f), load_stored(at)) : load_stored(at);
        }
    }
    __attribute__((always_inline)) void load_block() {
        scale_ = F::scales == Scales::e8m0 ? load_e8m0(header) : load_halves(header);
        if constexpr (F::is_grid) scale_ = scale_ * broadcast(factor_);
        if constexpr (F::mins > 0) min_ = load_halves(header + min_at(F::traits));
        if constexpr (F::has_byte_mins || F::has_half_mins) min_ = broadcast(0.0f) - min_;
    }
};

}  // namespace
}  // namespace octavo
