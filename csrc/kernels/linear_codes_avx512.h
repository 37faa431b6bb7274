// The codes of packed units in 512-bit registers: one register holds a quad of all 16 columns.
#pragma once

#include "linear_streams.h"

namespace octavo {
namespace {

inline __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }
// The code table, if the format has one. wide: adds 128.
template <typename F>
inline __m512i load_table(const WeightType& type) {
    if constexpr (!F::has_table) return _mm512_setzero_si512();
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(type.table)));
    return F::is_wide ? _mm512_xor_si512(table, _mm512_set1_epi8(-128)) : table;
}
// Moves the bits at `from` of every byte to `to`, and masks out all other bits of the 16-bit lanes.
template <int from, int to>
inline __m512i move_bits(__m512i x, int mask) {
    if constexpr (from < to) x = _mm512_slli_epi16(x, to - from);
    if constexpr (from > to) x = _mm512_srli_epi16(x, from - to);
    return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask)));
}

// The 64 codes of quad Q of 4 in a chunk of triples.
template <int Q>
inline __m512i unpack_triples(const uint8_t* chunk) {
    const auto bits = [&](int i, int mask) {
        return _mm512_and_si512(load_bytes(chunk + 64 * i), _mm512_set1_epi8(static_cast<char>(mask)));
    };
    if constexpr (Q < 3) return bits(Q, 63);
    // The high bits only move down, and never leave their byte.
    __m512i u = _mm512_or_si512(_mm512_srli_epi16(bits(0, 192), 2), bits(1, 192));
    u = _mm512_or_si512(_mm512_srli_epi16(u, 2), bits(2, 192));
    return _mm512_srli_epi16(u, 2);
}

// The 64 unsigned codes of quad Q; wide: w + 128.
template <typename F, int Q>
inline __m512i unpack_quad(const uint8_t* codes, [[maybe_unused]] __m512i table) {
    if constexpr (F::bits == 8) return _mm512_xor_si512(load_bytes(codes + 64 * Q), _mm512_set1_epi8(-128));
    if constexpr (F::has_triples) return unpack_triples<Q % 4>(codes + TRIPLE_BYTES * (Q / 4));
    __m512i u = _mm512_setzero_si512();
    if constexpr (F::has_nibbles) u = move_bits<4 * (Q % 2), 0>(load_bytes(codes + 64 * (Q / 2)), 15);
    if constexpr (F::has_table) u = _mm512_shuffle_epi8(table, u);
    if constexpr (F::has_pairs) u = move_bits<2 * (Q % 4), 0>(load_bytes(codes + 64 * (Q / 4)), 3);
    if constexpr (F::has_bits)
        u = _mm512_or_si512(u, move_bits<Q, F::bits_place>(load_bytes(codes + F::bits_offset), 1 << F::bits_place));
    return u;
}

// As above, for a grid whose vectors have been looked up.
template <typename F, int Q>
inline __m512i sign_vectors(const uint8_t* vectors, [[maybe_unused]] const uint8_t* codes) {
    __m512i w = load_bytes(vectors);
    if constexpr (F::has_signs) {
        uint64_t signs;
        std::memcpy(&signs, codes + F::signs_offset + 8 * Q, 8);
        w = _mm512_mask_sub_epi8(w, signs, _mm512_setzero_si512(), w);
    }
    return _mm512_xor_si512(w, _mm512_set1_epi8(-128));
}

// scale_j of 16 columns as floats.
template <typename F>
inline F32x16 load_half_scales(const uint8_t* p, [[maybe_unused]] int half) {
    if constexpr (F::has_e4m3_scales) return load_e4m3(p);
    if constexpr (F::scales == Scales::i8_per_half_unit) return load_i8(p);
    __m512i n = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    if (half == 1 && F::scales == Scales::odd_u4_per_half_unit) n = _mm512_srli_epi32(n, 4);
    n = _mm512_and_si512(n, _mm512_set1_epi32(15));
    if constexpr (F::scales == Scales::odd_u4_per_half_unit)
        n = _mm512_add_epi32(_mm512_add_epi32(n, n), _mm512_set1_epi32(1));
    return {_mm512_cvtepi32_ps(n)};
}

// Weights straight from the packed panel.
template <typename F>
struct PackedQuads : PackedUnits<F> {
    __m512i table;
    PackedQuads(const Panel& panel, int first, int count)
        : PackedUnits<F>(panel, first, count), table(load_table<F>(panel.type)) {}
    template <int Q>
    __m512i quad() const {
        if constexpr (F::is_grid)
            return sign_vectors<F, Q>(this->vectors(Q), this->codes());
        else
            return unpack_quad<F, Q>(this->codes(), table);
    }
    F32x16 half_scales(int half) const { return load_half_scales<F>(this->half_scale_bytes(half), half); }
};

}  // namespace
}  // namespace octavo
