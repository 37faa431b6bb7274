// Super-blocks that are summed in integers (linear_format.h): their terms, and their scales and minimums in the form
// that the kernels multiply by.
#pragma once

#include "linear_image.h"

namespace octavo {
namespace {

// S of a row, and the multiplier for its scales, which is 0 if all scales are 0 or one is not finite, as S shows.
struct BlockScale {
    float largest, factor;
};
template <typename Form>
inline BlockScale block_scale(uint8_t* block, int row, int r) {
    uint32_t largest = 0;
    for (int u = 0; u < Form::units; ++u) {
        uint32_t bits;
        std::memcpy(&bits, image_scales(block + u * r * ROW_UNIT_BYTES, r) + row, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float value;
    std::memcpy(&value, &largest, 4);
    return {value, value > 0.0f && value < __builtin_huge_valf() ? 32768.0f / value : 0.0f};
}

// The terms of one super-block of r rows.
template <typename Form>
inline __attribute__((always_inline)) void write_block(uint8_t* block, int r, int32_t* out) {
    BlockScale scales[ROW_GROUP];
    for (int i = 0; i < r; ++i) scales[i] = block_scale<Form>(block, i, r);
    int32_t multipliers[2][ROW_GROUP], sums[2][ROW_GROUP];  // M and B for two units
    for (int u = 0; u < Form::units; ++u, block += r * ROW_UNIT_BYTES) {
        const float* const unit_scales = image_scales(block, r);
        const int16_t *const p0 = image_pairs(block, r, 0), *const p1 = image_pairs(block, r, 1);
        int32_t(&m)[ROW_GROUP] = multipliers[u % 2];
        for (int i = 0; i < r; ++i) {
            const float scaled = scales[i].factor > 0.0f ? unit_scales[i] * scales[i].factor : 0.0f;
            const int rounded = static_cast<int>(__builtin_rintf(scaled));
            m[i] = rounded < 32767 ? rounded : 32767;
            sums[u % 2][i] = (m[i] * (p0[2 * i] + p0[2 * i + 1] + p1[2 * i] + p1[2 * i + 1]) + 2048) >> 12;
        }
        for (int i = 0; Form::has_zero_terms && i < r; ++i) {
            out[2 * u * r + i] = zero_term(Form::zero, p0[2 * i], p0[2 * i + 1]);
            out[(2 * u + 1) * r + i] = zero_term(Form::zero, p1[2 * i], p1[2 * i + 1], ODD_START);
        }
        int32_t* const to = out + Form::multipliers_at * r;
        for (int i = 0; i < r; ++i) {
            if constexpr (Form::sums > Form::units)
                to[u * r + i] = pair_of(m[i], m[i]);
            else if (u % 2 == 1)
                to[u / 2 * r + i] = pair_of(multipliers[0][i], m[i]);
        }
        for (int i = 0; Form::mins && u % 2 == 1 && i < r; ++i)
            out[(Form::mins_at + u / 2) * r + i] = pair_of(sums[0][i], sums[1][i]);
    }
    for (int i = 0; i < r; ++i) std::memcpy(out + Form::scale_at * r + i, &scales[i].largest, 4);
}

// Writes the terms of one group. Returns their end.
template <typename Form>
inline int32_t* write_terms(ImageGroup g, int units, [[maybe_unused]] int zero, int32_t* out) {
    if constexpr (Form::sums_blocks) {
        for (int u = 0; u < units; u += Form::units, out += Form::term_count * Form::units * g.rows) {
            if (g.rows == ROW_GROUP)
                write_block<Form>(g.unit(u), ROW_GROUP, out);
            else
                write_block<Form>(g.unit(u), g.rows, out);
        }
        return out;
    } else {
        return write_unit_terms<Form>(g, units, zero, out);
    }
}

// Factors for the sums of a super-block of 16 columns: +-c_i * 2^scale_shift, and n_u. With AVX2 and above, two numbers
// of each column are adjacent, 32 for two sums or units; elsewhere each has 16 columns.
template <typename Form>
struct alignas(64) BlockFactors {
    int16_t scales[Form::sums * PANEL_COLS];
    int16_t mins[(Form::mins ? Form::units : 2) * PANEL_COLS];
    float sum_factors[PANEL_COLS], min_factors[PANEL_COLS];
};

// The factor of a scale. Odd ones are negative.
template <typename Form>
constexpr int block_factor(int odd) {
    return odd ? -(1 << Form::scale_shift) : 1 << Form::scale_shift;
}

#if defined(__AVX512F__)

// Interleaves two rows of 16 bytes into pairs, one per column.
inline __m512i load_pairs(const uint8_t* bytes) {
    alignas(64) static constexpr int16_t PAIRS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m256i two = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
    return _mm512_permutexvar_epi16(_mm512_load_si512(PAIRS), _mm512_cvtepi8_epi16(two));
}
template <typename Form>
inline __m512i load_block_scales(const uint8_t* bytes) {
    return _mm512_mullo_epi16(load_pairs(bytes),
                              _mm512_set1_epi32(pair_of(block_factor<Form>(0), block_factor<Form>(1))));
}

#elif defined(__AVX2__)

// As above, for columns 8 H .. 8 H + 7.
template <int H>
inline __m256i load_pairs(const uint8_t* bytes) {
    const __m128i even = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8 * H));
    const __m128i odd = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + PANEL_COLS + 8 * H));
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(even, odd));
}
template <typename Form, int H>
inline __m256i load_block_scales(const uint8_t* bytes) {
    return _mm256_mullo_epi16(load_pairs<H>(bytes),
                              _mm256_set1_epi32(pair_of(block_factor<Form>(0), block_factor<Form>(1))));
}

#endif

// The current super-block of a walk over packed units.
template <typename F>
struct PackedBlock {
    using Form = FormOf<F>;
    const UnitCursor<F>& cursor;
    const uint8_t* scales() const { return cursor.header + byte_scales_at(F::traits); }
    const uint8_t* mins() const { return cursor.header + byte_mins_at(F::traits); }
    F32x16 sum_factors() const {
        return cursor.block_scale() * broadcast(static_cast<float>(1 << Form::shift) / block_factor<Form>(0));
    }
    F32x16 min_factors() const {
        if constexpr (Form::mins > 0) return cursor.block_min() * broadcast(0.125f);
        return broadcast(0.0f);
    }
};

// All scales of a super-block.
template <typename Form>
inline const int16_t* write_scales(const uint8_t* bytes, int16_t* out) {
    for (int i = 0; i < Form::sums * PANEL_COLS; i += 2 * PANEL_COLS) {
#if defined(__AVX512F__)
        _mm512_store_si512(out + i, load_block_scales<Form>(bytes + i));
#elif defined(__AVX2__)
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), load_block_scales<Form, 0>(bytes + i));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + i + PANEL_COLS), load_block_scales<Form, 1>(bytes + i));
#else
        for (int n = 0; n < 2 * PANEL_COLS; ++n)
            out[i + n] = static_cast<int16_t>(static_cast<int8_t>(bytes[i + n]) * block_factor<Form>(n / PANEL_COLS));
#endif
    }
    return out;
}

inline void write_mins(const uint8_t* bytes, int units, int16_t* out) {
    for (int i = 0; i < units * PANEL_COLS; i += 2 * PANEL_COLS) {
#if defined(__AVX512F__)
        _mm512_store_si512(out + i, load_pairs(bytes + i));
#elif defined(__AVX2__)
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), load_pairs<0>(bytes + i));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + i + PANEL_COLS), load_pairs<1>(bytes + i));
#else
        for (int n = 0; n < 2 * PANEL_COLS; ++n) out[i + n] = bytes[i + n];
#endif
    }
}

// Reads the current super-block of `cursor`.
template <typename F>
inline void read_block(const UnitCursor<F>& cursor, BlockFactors<FormOf<F>>& out) {
    const PackedBlock<F> block{cursor};
    write_scales<FormOf<F>>(block.scales(), out.scales);
    if constexpr (F::mins > 0) write_mins(block.mins(), FormOf<F>::units, out.mins);
    store(out.sum_factors, block.sum_factors());
    store(out.min_factors, block.min_factors());
}

}  // namespace
}  // namespace octavo
