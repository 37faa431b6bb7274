// Codes that are indices into a grid. The vectors of a unit are looked up, and then read in quads like byte codes.
//
// Each pair of columns takes two loads and a shuffle. On Zen 5, gather instructions take 1.4 to 2.3 times as long, and
// so do stores of single vectors.
#pragma once

#include "linear_format.h"

namespace octavo {
namespace {

constexpr int PAIRS = QUADS / 2;  // pairs of quads per unit: eight values of a column each
constexpr int INDICES = PAIRS * PANEL_COLS;

#if defined(__AVX2__)
using FourColumns = __m128i;

inline __m128i load_8(const int8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline __m128i load_4(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm_cvtsi32_si128(x);
}
// Splits the even and odd quads of four columns; `a` and `b` have two vectors each.
inline void split_quads(__m128i a, __m128i b, FourColumns& even, FourColumns& odd) {
    const __m128 x = _mm_castsi128_ps(a), y = _mm_castsi128_ps(b);
    even = _mm_castps_si128(_mm_shuffle_ps(x, y, 0x88));
    odd = _mm_castps_si128(_mm_shuffle_ps(x, y, 0xdd));
}
inline __m128i join_8(const int8_t* p, const int8_t* q) { return _mm_unpacklo_epi64(load_8(p), load_8(q)); }
inline __m128i join_4(const int8_t* p, const int8_t* q) { return _mm_unpacklo_epi32(load_4(p), load_4(q)); }
inline FourColumns join_pairs(__m128i a, __m128i b) { return _mm_unpacklo_epi64(a, b); }

// For 16 columns: low | (high << Shift & mask).
template <int Shift>
inline void join_indices(const uint8_t* low, const uint8_t* high, int mask, uint16_t* out) {
    const auto widen = [](const uint8_t* p) {
        return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    const __m256i bits =
        _mm256_and_si256(_mm256_slli_epi16(widen(high), Shift), _mm256_set1_epi16(static_cast<short>(mask)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_or_si256(widen(low), bits));
}

// Stores registers as wide as the loads that read a quad, so that a load does not wait for several stores.
inline void store_quad(const FourColumns (&x)[4], uint8_t* out) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(x[0]), x[1], 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(x[2]), x[3], 1);
#if defined(__AVX512F__)
    _mm512_storeu_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), high);
#endif
}
#elif defined(OCTAVO_NEON)
using FourColumns = int8x16_t;

template <int Shift>
inline void join_indices(const uint8_t* low, const uint8_t* high, int mask, uint16_t* out) {
    const uint16x8_t kept = vdupq_n_u16(static_cast<uint16_t>(mask));
    for (int i = 0; i < PANEL_COLS; i += 8) {
        const uint16x8_t bits = vandq_u16(vshlq_n_u16(vmovl_u8(vld1_u8(high + i)), Shift), kept);
        vst1q_u16(out + i, vorrq_u16(vmovl_u8(vld1_u8(low + i)), bits));
    }
}
inline int8x16_t join_8(const int8_t* p, const int8_t* q) { return vcombine_s8(vld1_s8(p), vld1_s8(q)); }
inline int8x8_t join_4(const int8_t* p, const int8_t* q) {
    int32_t x, y;
    std::memcpy(&x, p, 4);
    std::memcpy(&y, q, 4);
    return vreinterpret_s8_s32(vset_lane_s32(y, vdup_n_s32(x), 1));
}
inline FourColumns join_pairs(int8x8_t a, int8x8_t b) { return vcombine_s8(a, b); }
inline void split_quads(int8x16_t a, int8x16_t b, FourColumns& even, FourColumns& odd) {
    const int32x4_t x = vreinterpretq_s32_s8(a), y = vreinterpretq_s32_s8(b);
    even = vreinterpretq_s8_s32(vuzp1q_s32(x, y));
    odd = vreinterpretq_s8_s32(vuzp2q_s32(x, y));
}
inline void store_quad(const FourColumns (&x)[4], uint8_t* out) {
    for (int i = 0; i < 4; ++i) vst1q_s8(reinterpret_cast<int8_t*>(out) + 16 * i, x[i]);
}
#endif

#if defined(__AVX2__) || defined(OCTAVO_NEON)
// Looks up the vectors of a unit, without signs, as quads like those of byte codes. index: from grid_indices.
template <typename F>
inline void look_up(const int8_t* grid, const uint8_t* codes, const uint16_t* index, uint8_t* quads) {
    unroll<PAIRS>([&](auto pair) __attribute__((always_inline)) {
        constexpr int P = decltype(pair)::value;
        FourColumns even[4], odd[4];
        unroll<4>([&](auto group) __attribute__((always_inline)) {
            constexpr int G = decltype(group)::value, AT = PANEL_COLS * P + 4 * G;
            if constexpr (F::bits == 3) {
                const auto vector = [&](int i) { return grid + 4 * codes[AT + i]; };
                const auto other = [&](int i) { return grid + 4 * codes[INDICES + AT + i]; };
                even[G] = join_pairs(join_4(vector(0), vector(1)), join_4(vector(2), vector(3)));
                odd[G] = join_pairs(join_4(other(0), other(1)), join_4(other(2), other(3)));
            } else {
                const auto vector = [&](int i) { return grid + 8 * index[AT + i]; };
                split_quads(join_8(vector(0), vector(1)), join_8(vector(2), vector(3)), even[G], odd[G]);
            }
        });
        store_quad(even, quads + 2 * P * QUAD_BYTES);
        store_quad(odd, quads + (2 * P + 1) * QUAD_BYTES);
    });
}

// Writes the indices of a unit. For grids of four values they are the bytes of its planes.
template <typename F>
inline void grid_indices(const uint8_t* codes, uint16_t* index) {
    const uint8_t* const rest = codes + INDICES;
    unroll<F::bits == 3 ? 0 : PAIRS>([&](auto pair) __attribute__((always_inline)) {
        constexpr int P = decltype(pair)::value;
        constexpr int SHIFT = F::bits == 2 ? 8 - 2 * P : 8 - 4 * (P % 2), MASK = F::bits == 2 ? 0x300 : 0xf00;
        const uint8_t* const high = F::bits == 2 ? rest : rest + PANEL_COLS * (P / 2);
        join_indices<SHIFT>(codes + PANEL_COLS * P, high, MASK, index + PANEL_COLS * P);
    });
}
#endif

}  // namespace
}  // namespace octavo
