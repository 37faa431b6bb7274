// Products of quantized panels with 512-bit registers: one register holds a quad of all 16 columns. With VNNI the sums
// are int32 from the start; without it they are int16 as long as they fit (see linear_avx2.h), byte codes as two
// nibbles.
#pragma once

#include "linear_codes_avx512.h"
#include "linear_units.h"

namespace octavo {
namespace {

inline __m512i broadcast_i32(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}
// Hides a value from the compiler, which would otherwise reassociate sums, hold all products at once and spill them.
inline __m512i pin(__m512i x) {
#if !defined(OCTAVO_EMULATE_AVX512)
    __asm__("" : "+v"(x));
#endif
    return x;
}

template <typename F>
struct PackedSource : PackedQuads<F> {
    using Form = FormOf<F>;
    using PackedQuads<F>::PackedQuads;
};

// Unpacked units.
template <typename Form>
struct TileSource : TileUnits<Form> {
    template <int Q>
    __m512i quad() const {
        return load_bytes(this->tile->codes + 64 * Q);
    }
    F32x16 half_scales(int half) const { return load(this->tile->half_scales[half]); }
};

// Tiles for a core that starts as many products as loads in a cycle: some rows are loaded by four quads, and their
// quads are repeated in registers. Each other broadcast is a load.
template <typename Form>
struct ShuffledTileSource : TileSource<Form> {};
template <typename Source>
constexpr int SHUFFLED_ROWS = 0;
template <typename Form>
constexpr int SHUFFLED_ROWS<ShuffledTileSource<Form>> = 4;

inline __m512i broadcast_quads(const void* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
template <int Q>
inline __m512i repeat_quad(__m512i four) {
    return _mm512_shuffle_epi32(four, static_cast<_MM_PERM_ENUM>(0x55 * Q));
}

#if defined(OCTAVO_ISA_avx512vnni)
// Packed units that are left in tiles as they are read, for the rows that come after.
template <typename F>
struct KeepingSource : PackedSource<F> {
    UnitTile<FormOf<F>>* tile;
    FetchAhead ahead;
    KeepingSource(const Panel& panel, int first, int count, UnitTile<FormOf<F>>* tiles, FetchAhead ahead_)
        : PackedSource<F>(panel, first, count), tile(tiles), ahead(ahead_) {}
    void prefetch() { ahead.fetch(); }
    template <int Q>
    __m512i quad() const {
        const __m512i w = PackedSource<F>::template quad<Q>();
        _mm512_storeu_si512(tile->codes + 64 * Q, w);
        return w;
    }
    F32x16 scales() const {
        const F32x16 s = PackedSource<F>::scales();
        store(tile->scales, s);
        return s;
    }
    F32x16 mins(int half) const {
        const F32x16 m = PackedSource<F>::mins(half);
        store(tile->mins[half], m);
        return m;
    }
    F32x16 half_scales(int half) const {
        const F32x16 s = PackedSource<F>::half_scales(half);
        store(tile->half_scales[half], s);
        return s;
    }
    void next() {
        PackedSource<F>::next();
        ++tile;
    }
};
#endif

template <typename F>
void unpack_unit(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    unroll<QUADS>([&](auto q) __attribute__((always_inline)) {
        constexpr int Q = decltype(q)::value;
        _mm512_storeu_si512(tile.codes + 64 * Q, source.template quad<Q>());
    });
    store(tile.scales, source.scales());
    for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
    if constexpr (F::has_half_scales)
        for (int j = 0; j < 2; ++j) store(tile.half_scales[j], source.half_scales(j));
}

#if defined(OCTAVO_ISA_avx512)

// sum[r] = terms[r] + codes of quads [First, First + Count) x activations of row r. Terms are pairs of int16.
template <int R, int First, int Count, typename Source>
inline void sum_quads(const Source& source, const int8_t* a, const int32_t* terms, __m512i (&sum)[R]) {
    using Form = typename Source::Form;
    const __m512i ones = _mm512_set1_epi16(1), mask = _mm512_set1_epi8(15);
    __m512i high[R];
    unroll<Count>([&](auto i) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(i)::value;
        const __m512i u = source.template quad<Q>();
        const __m512i low = Form::is_wide ? _mm512_and_si512(u, mask) : u;
        for (int r = 0; r < R; ++r) {
            const __m512i x = broadcast_i32(a + 32 * r + 4 * Q), p = _mm512_maddubs_epi16(low, x);
            sum[r] = pin(Q == First ? p : _mm512_add_epi16(sum[r], p));
            if constexpr (Form::is_wide) {
                const __m512i h = _mm512_maddubs_epi16(move_bits<4, 0>(u, 15), x);
                high[r] = pin(Q == First ? h : _mm512_add_epi16(high[r], h));
            }
        }
    });
    for (int r = 0; r < R; ++r) {
        if constexpr (Form::is_wide) {
            high[r] = _mm512_add_epi16(high[r], broadcast_i32(terms + r));
            sum[r] =
                _mm512_add_epi32(_mm512_madd_epi16(sum[r], ones), _mm512_madd_epi16(high[r], _mm512_set1_epi16(16)));
        } else {
            if constexpr (Form::has_zero_terms) sum[r] = _mm512_add_epi16(sum[r], broadcast_i32(terms + r));
            sum[r] = _mm512_madd_epi16(sum[r], ones);
        }
    }
}

#else

// sum[r] = terms[r] + codes of quads [First, First + Count) x activations of row r.
template <int R, int First, int Count, typename Source>
inline void sum_quads(const Source& source, const int8_t* a, const int32_t* terms, __m512i (&sum)[R]) {
    using Form = typename Source::Form;
    constexpr int SHUFFLED = SHUFFLED_ROWS<Source>;
    // The instruction takes five cycles, two start in each: two chains for few rows, or where no loads are waited for.
    constexpr int CHAINS = R <= 4 || (SHUFFLED > 0 && Count == QUADS) ? 2 : 1;
    __m512i chain[CHAINS][R];
    for (int r = 0; r < R; ++r) {
        chain[CHAINS - 1][r] = _mm512_setzero_si512();
        chain[0][r] = Form::has_zero_terms ? broadcast_i32(terms + r) : _mm512_setzero_si512();
    }
    __m512i four[SHUFFLED + 1];
    unroll<Count>([&](auto i) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(i)::value, C = Q % CHAINS;
        for (int r = 0; Q % 4 == 0 && r < SHUFFLED; ++r) four[r] = pin(broadcast_quads(a + 32 * r + 4 * Q));
        const __m512i u = source.template quad<Q>();
        for (int r = 0; r < R; ++r) {
            const __m512i x = r < SHUFFLED ? repeat_quad<Q % 4>(four[r]) : broadcast_i32(a + 32 * r + 4 * Q);
            chain[C][r] = _mm512_dpbusd_epi32(chain[C][r], u, x);
        }
    });
    for (int r = 0; r < R; ++r)
        sum[r] = CHAINS == 2 ? _mm512_add_epi32(chain[0][r], chain[CHAINS - 1][r]) : chain[0][r];
}

#endif

// I of linear_format.h as floats: below 2^24, hence exact, the products with scale_j included.
template <int R, typename Source>
inline void unit_sums(const Source& source, const int8_t* a, const int32_t* terms, F32x16 (&sum)[R]) {
    using Form = typename Source::Form;
    __m512i first[R];
    if constexpr (!Form::in_halves) {
        sum_quads<R, 0, 8>(source, a, terms, first);
        for (int r = 0; r < R; ++r) sum[r] = {_mm512_cvtepi32_ps(first[r])};
    } else {
        __m512i second[R];
        sum_quads<R, 0, 4>(source, a, terms, first);
        sum_quads<R, 4, 4>(source, a, terms + R, second);
        for (int r = 0; r < R; ++r) {
            if constexpr (Form::has_half_scales) {
                const F32x16 s0 = {_mm512_cvtepi32_ps(first[r])}, s1 = {_mm512_cvtepi32_ps(second[r])};
                sum[r] = fma(s1, source.half_scales(1), s0 * source.half_scales(0));
            } else {
                sum[r] = {_mm512_cvtepi32_ps(_mm512_add_epi32(first[r], second[r]))};
            }
        }
    }
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    F32x16 y[R];
    for (int r = 0; r < R; ++r) y[r] = load(c + PANEL_COLS * r);
    for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
        source.prefetch();
        F32x16 sum[R];
        unit_sums<R>(source, reinterpret_cast<const int8_t*>(a), terms, sum);
        const UnitFactors<Form> factors(source);
        for (int r = 0; r < R; ++r) y[r] = factors.add(y[r], sum[r], a, terms, r, R);
    }
    for (int r = 0; r < R; ++r) store(c + PANEL_COLS * r, y[r]);
}

#if defined(OCTAVO_ISA_avx512vnni)
template <typename F>
__attribute__((noinline)) void multiply_group(const Panel& panel, int first, int units, const uint8_t* a,
                                              const int32_t* terms, float* c, UnitTile<FormOf<F>>* tiles,
                                              FetchAhead ahead) {
    multiply_units<ROW_GROUP>(KeepingSource<F>(panel, first, units, tiles, ahead), units, a, terms, c);
}

// sum[p][r] = terms[r] + codes of quads [First, First + Count) of panel p x activations of row r.
template <int First, int Count, typename Source>
inline void sum_pair_quads(const Source (&sources)[2], const int8_t* a, const int32_t* terms,
                           __m512i (&sum)[2][ROW_GROUP]) {
    using Form = typename Source::Form;
    for (int r = 0; r < ROW_GROUP; ++r)
        sum[0][r] = sum[1][r] = Form::has_zero_terms ? broadcast_i32(terms + r) : _mm512_setzero_si512();
    unroll<Count>([&](auto i) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(i)::value;
        const __m512i u[2] = {sources[0].template quad<Q>(), sources[1].template quad<Q>()};
        for (int r = 0; r < ROW_GROUP; ++r) {
            const __m512i x = pin(broadcast_i32(a + 32 * r + 4 * Q));
            for (int p = 0; p < 2; ++p) sum[p][r] = _mm512_dpbusd_epi32(sum[p][r], u[p], x);
        }
    });
}

// unit_sums of two panels.
template <typename Source>
inline void pair_sums(const Source (&sources)[2], const int8_t* a, const int32_t* terms, F32x16 (&sum)[2][ROW_GROUP]) {
    using Form = typename Source::Form;
    __m512i whole[2][ROW_GROUP];
    if constexpr (Form::has_half_scales) {
        sum_pair_quads<0, 4>(sources, a, terms, whole);
        for (int p = 0; p < 2; ++p) {
            const F32x16 scale = sources[p].half_scales(0);
            for (int r = 0; r < ROW_GROUP; ++r) sum[p][r] = F32x16{_mm512_cvtepi32_ps(whole[p][r])} * scale;
        }
        sum_pair_quads<4, 4>(sources, a, terms + ROW_GROUP, whole);
        for (int p = 0; p < 2; ++p) {
            const F32x16 scale = sources[p].half_scales(1);
            for (int r = 0; r < ROW_GROUP; ++r)
                sum[p][r] = fma(F32x16{_mm512_cvtepi32_ps(whole[p][r])}, scale, sum[p][r]);
        }
    } else {
        sum_pair_quads<0, QUADS>(sources, a, terms, whole);
        for (int p = 0; p < 2; ++p)
            for (int r = 0; r < ROW_GROUP; ++r) sum[p][r] = {_mm512_cvtepi32_ps(whole[p][r])};
    }
}

// multiply_units of two panels: a broadcast serves two products, and sixteen chains of them hide their latency. The
// sums stay in memory, because the chains fill the registers.
template <typename Form>
__attribute__((noinline)) void multiply_tile_pair(TilePair<Form> pair, int units, const uint8_t* a,
                                                  const int32_t* terms) {
    TileSource<Form> sources[2] = {{pair.of[0]}, {pair.of[1]}};
    for (int u = 0; u < units; ++u, a += ROW_UNIT_BYTES * ROW_GROUP, terms += Form::term_count * ROW_GROUP) {
        for (FetchAhead& ahead : pair.ahead) ahead.fetch();
        F32x16 sum[2][ROW_GROUP];
        pair_sums(sources, reinterpret_cast<const int8_t*>(a), terms, sum);
        const UnitFactors<Form> factors[2] = {UnitFactors<Form>(sources[0]), UnitFactors<Form>(sources[1])};
        for (int r = 0; r < ROW_GROUP; ++r) {
            for (int p = 0; p < 2; ++p) {
                float* const y = pair.sums[p] + PANEL_COLS * r;
                store(y, factors[p].add(load(y), sum[p][r], a, terms, r, ROW_GROUP));
            }
        }
        for (TileSource<Form>& source : sources) source.next();
    }
}
#endif

}  // namespace
}  // namespace octavo
