// Products of quantized panels with AVX2: vpmaddubsw (unsigned codes x signed activations), sums in int16 as long as
// they fit. A pair of products is at most 2 * code * 127, and a sum over n quads n times that: 8 quads of codes below
// 16, 4 of codes below 32, 2 of codes below 64. Where a zero point is subtracted the sum may pass beyond int16 on the
// way, as additions wrap around and the end fits: 16 * 16 * 127 and 8 * 32 * 127 are below 2^15.
// Byte codes are multiplied as |w| * (sign(w) a): no sum of two pairs fits. In a tile the sign is a mask m, 0 or -1,
// and |w| * (a ^ m) is w a, less |w| where w is negative; a core executes more `xor` than `sign` at once.
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
// Moves the bits at `from` of every byte to `to` and masks them; other bits of the 16-bit lanes fall away.
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
    __asm__("" : "+r"(chunk));  // read again: kept in registers since quad 0 they would be spilled
    // The high bits only move down, and never out of their byte.
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

// The same of a grid, from vectors that were looked up.
template <typename F, int Q, int H>
inline __m256i sign_vectors(const uint8_t* vectors, [[maybe_unused]] const uint8_t* codes) {
    const __m256i w = load_bytes(vectors + 32 * H);
    if constexpr (!F::has_signs) return w;
    // Four columns a 128-bit lane: two bytes of signs.
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

// scale_j of 16 columns, each twice: the factors of vpmaddwd.
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
    auto half_scales(int half) const {
        if constexpr (Form::has_float_scales)
            return load(this->tile->half_scales[half]);
        else if constexpr (!Form::has_half_scales)
            return I32x16{_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
        else
            return I32x16{load_bytes(this->tile->half_scales[half]), load_bytes(this->tile->half_scales[half] + 8)};
    }
};

// A packed unit that is left in a tile as it is read, for the rows that come after.
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

// Byte codes of a unit as magnitudes and signs, and the sums of the negative ones.
template <typename F>
void unpack_signed(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    constexpr int PART = FormOf<F>::has_float_scales ? QUADS / 2 : QUADS;  // quads of a sum
    const __m256i zero = _mm256_setzero_si256();
    __m256i start[2];
    unroll<QUADS>([&](auto q) __attribute__((always_inline)) {
        constexpr int Q = decltype(q)::value;
        const __m256i w[2] = {source.template quad<Q, 0>(), source.template quad<Q, 1>()};
        for (int h = 0; h < 2; ++h) {
            const __m256i size = _mm256_abs_epi8(w[h]), minus = _mm256_cmpgt_epi8(zero, w[h]);
            _mm256_store_si256(reinterpret_cast<__m256i*>(tile.codes + 64 * Q + 32 * h), size);
            _mm256_store_si256(reinterpret_cast<__m256i*>(tile.minus + 64 * Q + 32 * h), minus);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(size, minus), _mm256_set1_epi8(1));
            const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            start[h] = Q % PART == 0 ? sum : _mm256_add_epi32(start[h], sum);
            if (Q % PART == PART - 1)
                _mm256_store_si256(reinterpret_cast<__m256i*>(tile.starts[Q / PART] + 8 * h), start[h]);
        }
    });
}

template <typename F>
void unpack_unit(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    const KeepingSource<F> keeping{source, tile};
    if constexpr (FormOf<F>::is_wide) {
        unpack_signed<F>(source, tile);
    } else {
        unroll<QUADS>([&](auto q) __attribute__((always_inline)) {
            keeping.template quad<decltype(q)::value, 0>();
            keeping.template quad<decltype(q)::value, 1>();
        });
    }
    keeping.scales();
    for (int j = 0; j < F::mins; ++j) keeping.mins(j);
    for (int j = 0; F::has_half_scales && j < 2; ++j) keeping.half_scales(j);
}

// acc[r][h] += codes of quads [First, First + Count) x activations, int16; starts at zero.
template <int R, int First, int Count, typename Source>
__attribute__((always_inline)) inline void add_quads(const Source& source, const int8_t* a, __m256i (&acc)[R][2]) {
    unroll<Count>([&](auto i) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(i)::value;
        const __m256i w0 = source.template quad<Q, 0>(), w1 = source.template quad<Q, 1>();
        unroll<R>([&](auto row) __attribute__((always_inline)) {
            constexpr int r = decltype(row)::value;
            const __m256i x = broadcast_i32(a + 32 * r + 4 * Q);
            const __m256i p0 = _mm256_maddubs_epi16(w0, x), p1 = _mm256_maddubs_epi16(w1, x);
            acc[r][0] = pin(Q == First ? p0 : _mm256_add_epi16(acc[r][0], p0));
            acc[r][1] = pin(Q == First ? p1 : _mm256_add_epi16(acc[r][1], p1));
        });
    });
}

template <int R>
__attribute__((always_inline)) inline void add_terms(const int32_t* terms, __m256i (&acc)[R][2]) {
    unroll<R>([&](auto row) __attribute__((always_inline)) {
        constexpr int r = decltype(row)::value;
        const __m256i t = broadcast_i32(terms + r);
        acc[r][0] = _mm256_add_epi16(acc[r][0], t);
        acc[r][1] = _mm256_add_epi16(acc[r][1], t);
    });
}

// acc[r][h] (int16) becomes the exact int32 sums of the unit.
template <int R, typename Source>
__attribute__((always_inline)) inline void unit_sums(const Source& source, const int8_t* a, const int32_t* terms,
                                                     __m256i (&acc)[R][2]) {
    using Form = typename Source::Form;
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (!Form::in_halves) {
        add_quads<R, 0, 8>(source, a, acc);
        if constexpr (Form::has_zero_terms) add_terms<R>(terms, acc);
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < 2; ++h) acc[r][h] = _mm256_madd_epi16(acc[r][h], ones);
    } else {
        __m256i first[R][2];
        unroll<2>([&](auto half) __attribute__((always_inline)) {
            constexpr int J = decltype(half)::value;
            // Codes below 64 without a zero point do not occur, so four quads always fit.
            add_quads<R, 4 * J, 4>(source, a, acc);
            if constexpr (Form::has_zero_terms) add_terms<R>(terms + J * R, acc);
            const I32x16 s = source.half_scales(J);
            for (int r = 0; r < R; ++r) {
                acc[r][0] = _mm256_madd_epi16(acc[r][0], s.lo);
                acc[r][1] = _mm256_madd_epi16(acc[r][1], s.hi);
                for (int h = 0; h < 2; ++h)
                    if (J == 0)
                        first[r][h] = acc[r][h];
                    else
                        acc[r][h] = _mm256_add_epi32(acc[r][h], first[r][h]);
            }
        });
    }
}

// The same for byte codes of quads [First, First + Count): a pair of products |w| * (sign(w) a) fits into int16.
template <int R, int First, int Count, typename Source>
__attribute__((always_inline)) inline void unit_sums_signed(const Source& source, const int8_t* a,
                                                            __m256i (&acc)[R][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    unroll<Count>([&](auto q) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(q)::value;
        const __m256i w[2] = {source.template quad<Q, 0>(), source.template quad<Q, 1>()};
        for (int r = 0; r < R; ++r) {
            const __m256i x = broadcast_i32(a + 32 * r + 4 * Q);
            for (int h = 0; h < 2; ++h) {
                const __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(x, w[h]));
                acc[r][h] = pin(_mm256_add_epi32(acc[r][h], _mm256_madd_epi16(p, ones)));
            }
        }
    });
}

// The same of a tile.
template <int R, int First, int Count, typename Form>
__attribute__((always_inline)) inline void unit_sums_signed(const TileSource<Form>& source, const int8_t* a,
                                                            __m256i (&acc)[R][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) acc[r][h] = load_bytes(source.tile->starts[First / Count] + 8 * h);
    unroll<Count>([&](auto q) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(q)::value;
        const uint8_t* const signs = source.tile->minus + 64 * Q;
        const __m256i size[2] = {source.template quad<Q, 0>(), source.template quad<Q, 1>()};
        const __m256i minus[2] = {load_bytes(signs), load_bytes(signs + 32)};
        for (int r = 0; r < R; ++r) {
            const __m256i x = broadcast_i32(a + 32 * r + 4 * Q);
            for (int h = 0; h < 2; ++h) {
                const __m256i p = _mm256_maddubs_epi16(size[h], _mm256_xor_si256(x, minus[h]));
                acc[r][h] = pin(_mm256_add_epi32(acc[r][h], _mm256_madd_epi16(p, ones)));
            }
        }
    });
}

inline F32x16 to_floats(const __m256i (&sum)[2]) { return {_mm256_cvtepi32_ps(sum[0]), _mm256_cvtepi32_ps(sum[1])}; }

// I of linear_format.h, if scales of half units are floats.
template <int R, typename Source>
__attribute__((always_inline)) inline void scaled_sums(const Source& source, const int8_t* a, const int32_t* terms,
                                                       F32x16 (&sum)[R]) {
    using Form = typename Source::Form;
    unroll<2>([&](auto half) __attribute__((always_inline)) {
        constexpr int J = decltype(half)::value;
        __m256i acc[R][2];
        if constexpr (Form::is_wide) {
            unit_sums_signed<R, 4 * J, 4>(source, a, acc);
        } else {
            add_quads<R, 4 * J, 4>(source, a, acc);
            if constexpr (Form::has_zero_terms) add_terms<R>(terms + J * R, acc);
            for (int r = 0; r < R; ++r)
                for (int h = 0; h < 2; ++h) acc[r][h] = _mm256_madd_epi16(acc[r][h], _mm256_set1_epi16(1));
        }
        const F32x16 scales = source.half_scales(J);
        for (int r = 0; r < R; ++r)
            sum[r] = J == 0 ? to_floats(acc[r]) * scales : fma(to_floats(acc[r]), scales, sum[r]);
    });
}

// c [R][16] += what the sums of a unit stand for; sum(r): those of row r as floats.
template <int R, typename Form, typename Sum>
__attribute__((always_inline)) inline void add_sums(const UnitFactors<Form>& factors, const Sum& sum, const uint8_t* a,
                                                    const int32_t* terms, float* c) {
    // Registers are for the integer sums: c is updated in the L1 cache, and not kept in spill slots as well.
    if (R > 2) __asm__("" : "+r"(c));
    for (int r = 0; r < R; ++r)
        store(c + PANEL_COLS * r, factors.add(load(c + PANEL_COLS * r), sum(r), a, terms, r, R));
}

// c [R][16] += a * weights of one unit.
template <int R, typename Source>
__attribute__((always_inline)) inline void multiply_unit(const Source& source, const uint8_t* a, const int32_t* terms,
                                                         float* c) {
    using Form = typename Source::Form;
    const int8_t* const codes = reinterpret_cast<const int8_t*>(a);
    if constexpr (Form::has_float_scales) {
        F32x16 sum[R];
        scaled_sums<R>(source, codes, terms, sum);
        add_sums<R>(UnitFactors<Form>(source), [&](int r) { return sum[r]; }, a, terms, c);
    } else {
        __m256i sum[R][2];
        if constexpr (Form::is_wide)
            unit_sums_signed<R, 0, QUADS>(source, codes, sum);
        else
            unit_sums<R>(source, codes, terms, sum);
        add_sums<R>(UnitFactors<Form>(source), [&](int r) { return to_floats(sum[r]); }, a, terms, c);
    }
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
        source.prefetch();
        multiply_unit<R>(source, a, terms, c);
    }
}

// c [4][16] += a * `units` units of the source, for a whole group. Leaves them in `tiles`.
template <typename F>
void multiply_keeping(PackedSource<F>& source, int units, ImageGroup a, const int32_t* terms, float* c,
                      UnitTile<FormOf<F>>* tiles) {
    for (int u = 0; u < units; ++u, source.next(), terms += FormOf<F>::term_count * ROW_GROUP) {
        source.prefetch();
        if constexpr (FormOf<F>::is_wide) {
            unpack_unit<F>(source, tiles[u]);
            multiply_unit<ROW_GROUP>(TileSource<FormOf<F>>{tiles + u}, a.unit(u), terms, c);
        } else {
            multiply_unit<ROW_GROUP>(KeepingSource<F>{source, tiles[u]}, a.unit(u), terms, c);
        }
    }
}

}  // namespace
}  // namespace octavo
