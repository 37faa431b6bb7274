// The codes of packed and unpacked units in 256-bit registers, each with half of the columns of a quad.
#pragma once

#include "linear_units.h"

namespace octavo {
namespace {

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast_i32(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
}
// The code table, if the format has one.
template <typename F>
inline __m256i load_table(const WeightType& type) {
    if constexpr (!F::has_table) return _mm256_setzero_si256();
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(type.table)));
}
// Hides a value from the compiler, which would otherwise reassociate sums, hold all products at once and spill them.
inline __m256i pin(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
}
// Moves the bits at `from` of every byte to `to`, and masks out all other bits of the 16-bit lanes.
template <int from, int to>
inline __m256i move_bits(__m256i x, int mask) {
    if constexpr (from < to) x = _mm256_slli_epi16(x, to - from);
    if constexpr (from > to) x = _mm256_srli_epi16(x, from - to);
    return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask)));
}

// The 32 codes of quad Q of 4 in a chunk of triples.
template <int Q>
inline __m256i unpack_triples(const uint8_t* chunk) {
    const auto bits = [&](int i, int mask) {
        return _mm256_and_si256(load_bytes(chunk + 64 * i), _mm256_set1_epi8(static_cast<char>(mask)));
    };
    if constexpr (Q < 3) return bits(Q, 63);
    __asm__("" : "+r"(chunk));  // read again, because keeping it in registers since quad 0 would spill
    // The high bits only move down, and never leave their byte.
    __m256i u = _mm256_or_si256(_mm256_srli_epi16(bits(0, 192), 2), bits(1, 192));
    u = _mm256_or_si256(_mm256_srli_epi16(u, 2), bits(2, 192));
    return _mm256_srli_epi16(u, 2);
}

// The 32 codes of quad Q, half H of the columns.
template <typename F, int Q, int H>
inline __m256i unpack_quad(const uint8_t* codes, [[maybe_unused]] __m256i table) {
    if constexpr (F::bits == 8) return load_bytes(codes + 64 * Q + 32 * H);
    if constexpr (F::has_triples) return unpack_triples<Q % 4>(codes + TRIPLE_BYTES * (Q / 4) + 32 * H);
    __m256i u = _mm256_setzero_si256();
    if constexpr (F::has_nibbles) u = move_bits<4 * (Q % 2), 0>(load_bytes(codes + 64 * (Q / 2) + 32 * H), 15);
    if constexpr (F::has_table) u = _mm256_shuffle_epi8(table, u);
    if constexpr (F::has_pairs) u = move_bits<2 * (Q % 4), 0>(load_bytes(codes + 64 * (Q / 4) + 32 * H), 3);
    if constexpr (F::has_bits) {
        const __m256i bits = load_bytes(codes + F::bits_offset + 32 * H);
        u = _mm256_or_si256(u, move_bits<Q, F::bits_place>(bits, 1 << F::bits_place));
    }
    return u;
}

// As above, for a grid whose vectors have been looked up.
template <typename F, int Q, int H>
inline __m256i sign_vectors(const uint8_t* vectors, [[maybe_unused]] const uint8_t* codes) {
    const __m256i w = load_bytes(vectors + 32 * H);
    if constexpr (!F::has_signs) return w;
    // Each 128-bit lane has four columns: two bytes of signs.
    const __m256i spread =
        _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m256i signs = _mm256_shuffle_epi8(broadcast_i32(codes + F::signs_offset + 8 * Q + 4 * H), spread);
    const __m256i minus = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bit), bit);
    return _mm256_sign_epi8(w, _mm256_or_si256(minus, _mm256_set1_epi8(1)));
}

// scale_j of 16 columns as floats.
template <typename F>
inline F32x16 load_float_scales(const uint8_t* p, [[maybe_unused]] int half) {
    if constexpr (F::has_e4m3_scales) return load_e4m3(p);
    __m128i n = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if (half == 1) n = _mm_srli_epi16(n, 4);
    n = _mm_and_si128(n, _mm_set1_epi8(15));
    n = _mm_add_epi8(_mm_add_epi8(n, n), _mm_set1_epi8(1));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(n)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(n, 8)))};
}

// scale_j of 16 columns, each duplicated, as vpmaddwd needs it.
struct I32x16 {
    __m256i lo, hi;
};
template <typename F>
inline I32x16 load_half_scales(const uint8_t* p) {
    if constexpr (!F::has_half_scales) return {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (F::scales == Scales::u4_per_half_unit) bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_cvtepi8_epi16(bytes), 0xd8);
    const __m256i lo = _mm256_unpacklo_epi16(words, words), hi = _mm256_unpackhi_epi16(words, words);
    return {lo, hi};  // columns 0 .. 7 and 8 .. 15
}

// Weights straight from the packed panel.
template <typename F>
struct PackedSource : PackedUnits<F> {
    using Form = FormOf<F>;
    __m256i table;
    PackedSource(const Panel& panel, int first, int count)
        : PackedUnits<F>(panel, first, count), table(load_table<F>(panel.type)) {}
    template <int Q, int H>
    __m256i quad() const {
        if constexpr (F::is_grid)
            return sign_vectors<F, Q, H>(this->vectors(Q), this->codes());
        else
            return unpack_quad<F, Q, H>(this->codes(), table);
    }
    // The scales of the super-block that begins here, stored in `memory`.
    const int16_t* all_scales(int16_t* memory) const {
        return write_scales<Form>(PackedBlock<F>{*this}.scales(), memory);
    }
    // Columns 8 H .. 8 H + 7 for sums 2 pair and 2 pair + 1 of a super-block, for its units 2 p and 2 p + 1, and for
    // its end. unit: the position within the super-block.
    template <int H>
    __m256i block_scales(int pair, int) const {
        return load_block_scales<Form, H>(PackedBlock<F>{*this}.scales() + 2 * PANEL_COLS * pair);
    }
    template <int H>
    __m256i block_mins(int p, int) const {
        return load_pairs<H>(PackedBlock<F>{*this}.mins() + 2 * PANEL_COLS * p);
    }
    BlockEnd<Form> end(int) const { return packed_end<F>(*this); }
    auto half_scales(int half) const {
        if constexpr (FormOf<F>::has_float_scales)
            return load_float_scales<F>(this->half_scale_bytes(half), half);
        else
            return load_half_scales<F>(this->half_scale_bytes(half));
    }
};

// Unpacked units.
template <typename Form>
struct TileSource : TileUnits<Form> {
    template <int Q, int H>
    __m256i quad() const {
        return load_bytes(this->tile->codes + 64 * Q + 32 * H);
    }
    template <int H>
    __m256i block_scales(int pair, int unit) const {
        return load_bytes(this->block(unit).scales + PANEL_COLS * (2 * pair + H));
    }
    template <int H>
    __m256i block_mins(int p, int unit) const {
        return load_bytes(this->block(unit).mins + PANEL_COLS * (2 * p + H));
    }
    BlockEnd<Form> end(int unit) const { return block_end(this->block(unit)); }
    auto half_scales(int half) const {
        if constexpr (Form::has_float_scales)
            return load(this->tile->half_scales[half]);
        else if constexpr (!Form::has_half_scales)
            return I32x16{_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
        else
            return I32x16{load_bytes(this->tile->half_scales[half]), load_bytes(this->tile->half_scales[half] + 8)};
    }
};

// A packed unit that is also stored in a tile as it is read, for the rows that follow.
template <typename F>
struct KeepingSource {
    using Form = FormOf<F>;
    const PackedSource<F>& packed;
    UnitTile<Form>& tile;
    template <int Q, int H>
    __m256i quad() const {
        const __m256i w = packed.template quad<Q, H>();
        _mm256_store_si256(reinterpret_cast<__m256i*>(tile.codes + 64 * Q + 32 * H), w);
        return w;
    }
    F32x16 scales() const {
        const F32x16 s = packed.scales();
        store(tile.scales, s);
        return s;
    }
    F32x16 mins(int half) const {
        const F32x16 m = packed.mins(half);
        store(tile.mins[half], m);
        return m;
    }
    auto half_scales(int half) const {
        const auto s = packed.half_scales(half);
        if constexpr (Form::has_float_scales) {
            store(tile.half_scales[half], s);
        } else if constexpr (Form::has_half_scales) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(tile.half_scales[half]), s.lo);
            _mm256_store_si256(reinterpret_cast<__m256i*>(tile.half_scales[half] + 8), s.hi);
        }
        return s;
    }
};

// As above, over the units of super-blocks that are summed in integers.
template <typename F>
struct KeepingBlock {
    using Form = FormOf<F>;
    PackedSource<F> packed;
    UnitTile<Form>* tile;
    template <int Q, int H>
    __m256i quad() const {
        return KeepingSource<F>{packed, *tile}.template quad<Q, H>();
    }
    const int16_t* all_scales(int16_t*) const { return packed.all_scales(tile->block.scales); }
    template <int H>
    __m256i block_scales(int pair, int unit) const {
        return kept(packed.template block_scales<H>(pair, unit),
                    tile[-unit].block.scales + PANEL_COLS * (2 * pair + H));
    }
    template <int H>
    __m256i block_mins(int p, int unit) const {
        return kept(packed.template block_mins<H>(p, unit), tile[-unit].block.mins + PANEL_COLS * (2 * p + H));
    }
    BlockEnd<Form> end(int unit) const {
        const BlockEnd<Form> end = packed.end(unit);
        store(tile[-unit].block.sum_factors, end.sum_factors);
        store(tile[-unit].block.min_factors, end.min_factors);
        return end;
    }
    static __m256i kept(__m256i x, int16_t* at) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(at), x);
        return x;
    }
    __attribute__((always_inline)) void prefetch() const { packed.prefetch(); }
    void next() {
        packed.next();
        ++tile;
    }
};

}  // namespace
}  // namespace octavo
