// Products of quantized panels with 512-bit registers, each of which holds a quad of all 16 columns. With VNNI the sums
// are int32 from the start. Without it they are int16 while they fit (see linear_avx2.h), and byte codes are split into
// two nibbles.
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
    // The scales of the super-block that begins here, stored in `memory`.
    const int16_t* all_scales(int16_t* memory) const {
        return write_scales<Form>(PackedBlock<F>{*this}.scales(), memory);
    }
    // Scales for sums 2 pair and 2 pair + 1 of a super-block, for its units 2 p and 2 p + 1, and for its end. unit: the
    // position within the super-block.
    __m512i block_scales(int pair, int) const {
        return load_block_scales<Form>(PackedBlock<F>{*this}.scales() + 2 * PANEL_COLS * pair);
    }
    __m512i block_mins(int p, int) const { return load_pairs(PackedBlock<F>{*this}.mins() + 2 * PANEL_COLS * p); }
    BlockEnd<Form> end(int) const { return packed_end<F>(*this); }
};

// Unpacked units.
template <typename Form>
struct TileSource : TileUnits<Form> {
    template <int Q>
    __m512i quad() const {
        return load_bytes(this->tile->codes + 64 * Q);
    }
    __m512i block_scales(int pair, int unit) const {
        return load_bytes(this->block(unit).scales + 2 * PANEL_COLS * pair);
    }
    __m512i block_mins(int p, int unit) const { return load_bytes(this->block(unit).mins + 2 * PANEL_COLS * p); }
    BlockEnd<Form> end(int unit) const { return block_end(this->block(unit)); }
    F32x16 half_scales(int half) const { return load(this->tile->half_scales[half]); }
};

// Tiles for a core that can start as many products as loads per cycle: some rows are loaded four quads at a time and
// the quads are repeated in registers. All other broadcasts are loads.
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
// Packed units that are also stored in tiles as they are read, for the rows that follow.
template <typename F>
struct KeepingSource : PackedSource<F> {
    UnitTile<FormOf<F>>* tile;
    FetchAhead ahead;
    KeepingSource(const Panel& panel, int first, int count, UnitTile<FormOf<F>>* tiles, FetchAhead ahead_)
        : PackedSource<F>(panel, first, count), tile(tiles), ahead(ahead_) {}
    __attribute__((always_inline)) void prefetch() { ahead.fetch(); }
    const int16_t* all_scales(int16_t*) const { return PackedSource<F>::all_scales(tile->block.scales); }
    __m512i block_scales(int pair, int unit) const {
        const __m512i s = PackedSource<F>::block_scales(pair, unit);
        _mm512_store_si512(tile[-unit].block.scales + 2 * PANEL_COLS * pair, s);
        return s;
    }
    __m512i block_mins(int p, int unit) const {
        const __m512i m = PackedSource<F>::block_mins(p, unit);
        _mm512_store_si512(tile[-unit].block.mins + 2 * PANEL_COLS * p, m);
        return m;
    }
    BlockEnd<FormOf<F>> end(int unit) const {
        const BlockEnd<FormOf<F>> end = PackedSource<F>::end(unit);
        store(tile[-unit].block.sum_factors, end.sum_factors);
        store(tile[-unit].block.min_factors, end.min_factors);
        return end;
    }
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
    if constexpr (F::sums_blocks) {
        if (source.unit == 0) read_block<F>(source, tile.block);
    } else {
        store(tile.scales, source.scales());
        for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
        if constexpr (F::has_half_scales)
            for (int j = 0; j < 2; ++j) store(tile.half_scales[j], source.half_scales(j));
    }
}

#if defined(OCTAVO_ISA_avx512)

// sum[r] = terms[r] + codes of quads [First, First + Count) x activations of row r. Terms are pairs of int16; without
// terms the sum starts at Start.
template <int R, int First, int Count, int Start = 0, typename Source>
__attribute__((always_inline)) inline void sum_quads(const Source& source, const int8_t* a, const int32_t* terms,
                                                     __m512i (&sum)[R]) {
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
            if constexpr (Start != 0 && !Form::has_zero_terms)
                sum[r] = _mm512_add_epi32(sum[r], _mm512_set1_epi32(Start));
        }
    }
}

#else

// sum[r] = terms[r] + codes of quads [First, First + Count) x activations of row r; without terms it starts at Start.
template <int R, int First, int Count, int Start = 0, typename Source>
__attribute__((always_inline)) inline void sum_quads(const Source& source, const int8_t* a, const int32_t* terms,
                                                     __m512i (&sum)[R]) {
    using Form = typename Source::Form;
    constexpr int SHUFFLED = SHUFFLED_ROWS<Source>;
    // A latency of five cycles, and two start per cycle: two chains for few rows, or if loads cause no waits.
    constexpr int CHAINS = R <= 4 || (SHUFFLED > 0 && Count == QUADS) ? 2 : 1;
    __m512i chain[CHAINS][R];
    for (int r = 0; r < R; ++r) {
        chain[CHAINS - 1][r] = _mm512_setzero_si512();
        chain[0][r] = Form::has_zero_terms ? broadcast_i32(terms + r) : _mm512_set1_epi32(Start);
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

// I as in linear_format.h, as floats: below 2^24, hence exact, including the products with scale_j.
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

inline __m512i add_products(__m512i sum, __m512i a, __m512i b) {
#if defined(OCTAVO_ISA_avx512)
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#else
    return _mm512_dpwssd_epi32(sum, a, b);
#endif
}

// Two shifted sums of int32 as pairs of int16. The second is negated: it arrives without 1, and -x is NOT (x - 1).
template <int Shift>
inline __m512i as_pairs(__m512i first, __m512i second) {
    const __m512i low = Shift > 0 ? _mm512_srli_epi32(first, Shift) : first;
    const __m512i high = _mm512_slli_epi32(second, 16 - Shift), of_high = _mm512_set1_epi32(-65536);
    return _mm512_ternarylogic_epi32(of_high, low, high, 0x5c);  // of_high ? ~high : low
}

// Sum i of the current super-block of source and a, odd if J is 1.
template <int R, int J, typename Source>
__attribute__((always_inline)) inline void block_sum(const Source& source, const uint8_t* a, const int32_t* terms,
                                                     int i, __m512i (&sum)[R]) {
    using Form = typename Source::Form;
    constexpr int START = J * ODD_START;
    const int8_t* const codes = reinterpret_cast<const int8_t*>(a);
    if constexpr (Form::has_half_scales) {
        sum_quads<R, 4 * J, 4>(source, codes, terms + i * R, sum);
    } else if constexpr (!Form::in_halves) {
        sum_quads<R, 0, 8, START>(source, codes, terms, sum);
    } else {
        __m512i rest[R];
        sum_quads<R, 0, 4, START>(source, codes, terms, sum);
        sum_quads<R, 4, 4>(source, codes, terms, rest);
        for (int r = 0; r < R; ++r) sum[r] = _mm512_add_epi32(sum[r], rest[r]);
    }
}

// whole[r] += sums 2 pair and 2 pair + 1 of a super-block times their scales. terms: of the super-block. Leaves the
// source at the last unit and `a` at the unit after it.
template <int R, typename Source>
__attribute__((always_inline)) inline void add_pair(Source& source, const int16_t* all_scales, const uint8_t*& a,
                                                    const int32_t* terms, int pair, __m512i (&whole)[R]) {
    using Form = typename Source::Form;
    __m512i first[R], second[R];
    source.prefetch();
    block_sum<R, 0>(source, a, terms, 2 * pair, first);
    if constexpr (!Form::has_half_scales) {
        a += ROW_UNIT_BYTES * R;
        source.next();
        source.prefetch();
    }
    block_sum<R, 1>(source, a, terms, 2 * pair + 1, second);
    a += ROW_UNIT_BYTES * R;
    const __m512i scales = Form::has_half_scales ? load_bytes(all_scales + 2 * PANEL_COLS * pair)
                                                 : source.block_scales(pair, 2 * pair + 1);
    for (int r = 0; r < R; ++r) {
        const __m512i f = _mm512_mulhrs_epi16(scales, broadcast_i32(terms + (Form::multipliers_at + pair) * R + r));
        whole[r] = add_products(whole[r], as_pairs<Form::shift>(first[r], second[r]), f);
    }
}

// c [R][16] += a * weights over super-blocks that are summed in integers.
template <int R, typename Source>
__attribute__((always_inline)) inline void multiply_blocks(Source source, int units, const uint8_t* a,
                                                           const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    // Scales of half units are all read at the start of their super-block; one at a time, each would wait for memory.
    alignas(64) int16_t memory[Form::sums * PANEL_COLS];
    for (int u = 0; u < units; u += Form::units, terms += Form::units * Form::term_count * R) {
        const int16_t* const scales = Form::has_half_scales ? source.all_scales(memory) : nullptr;
        __m512i whole[R], mins[R];
        for (int r = 0; r < R; ++r) whole[r] = _mm512_setzero_si512();
        for (int pair = 0; pair < Form::sums / 2; ++pair) {
            if (pair > 0) source.next();
            add_pair<R>(source, scales, a, terms, pair, whole);
        }
        constexpr int LAST = Form::units - 1;
        for (int r = 0; r < R; ++r) mins[r] = pin(_mm512_setzero_si512());
        for (int p = 0; p < (Form::mins ? Form::units / 2 : 0); ++p) {
            const __m512i m = source.block_mins(p, LAST);
            for (int r = 0; r < R; ++r)
                mins[r] = pin(add_products(mins[r], m, broadcast_i32(terms + (Form::mins_at + p) * R + r)));
        }
        const BlockEnd<Form> end = source.end(LAST);
        for (int r = 0; r < R; ++r)
            store(c + PANEL_COLS * r, end.add(load(c + PANEL_COLS * r), {_mm512_cvtepi32_ps(whole[r])},
                                              {_mm512_cvtepi32_ps(mins[r])}, as_float(terms[Form::scale_at * R + r])));
        source.next();
    }
}

// As above, for units with their own scales.
template <int R, typename Source>
inline void multiply_scaled_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
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

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    if constexpr (Source::Form::sums_blocks)
        multiply_blocks<R>(source, units, a, terms, c);
    else
        multiply_scaled_units<R>(source, units, a, terms, c);
}

#if defined(OCTAVO_ISA_avx512vnni)
template <typename F>
__attribute__((noinline)) void multiply_group(const Panel& panel, int first, int units, const uint8_t* a,
                                              const int32_t* terms, float* c, UnitTile<FormOf<F>>* tiles,
                                              FetchAhead ahead) {
    multiply_units<ROW_GROUP>(KeepingSource<F>(panel, first, units, tiles, ahead), units, a, terms, c);
}

// sum[p][r] = terms[r] + codes of quads [First, First + Count) of panel p x activations of row r.
template <int First, int Count, int Start = 0, typename Source>
inline void sum_pair_quads(const Source (&sources)[2], const int8_t* a, const int32_t* terms,
                           __m512i (&sum)[2][ROW_GROUP]) {
    using Form = typename Source::Form;
    for (int r = 0; r < ROW_GROUP; ++r)
        sum[0][r] = sum[1][r] = Form::has_zero_terms ? broadcast_i32(terms + r) : _mm512_set1_epi32(Start);
    unroll<Count>([&](auto i) __attribute__((always_inline)) {
        constexpr int Q = First + decltype(i)::value;
        const __m512i u[2] = {sources[0].template quad<Q>(), sources[1].template quad<Q>()};
        for (int r = 0; r < ROW_GROUP; ++r) {
            const __m512i x = pin(broadcast_i32(a + 32 * r + 4 * Q));
            for (int p = 0; p < 2; ++p) sum[p][r] = _mm512_dpbusd_epi32(sum[p][r], u[p], x);
        }
    });
}

// unit_sums for two panels.
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

// A super-block of two panels that is summed in integers. All sums of a pair stay in memory, because the chains fill
// the registers.
template <typename Form>
inline void multiply_block_pair(TilePair<Form>& pair, const UnitTile<Form>* const (&tiles)[2], const uint8_t* a,
                                const int32_t* terms) {
    constexpr int QUADS_OF_SUM = Form::has_half_scales ? 4 : 8, UNITS_OF_PAIR = Form::has_half_scales ? 1 : 2;
    __m512i sum[2][ROW_GROUP];
    for (int r = 0; r < ROW_GROUP; ++r) sum[0][r] = sum[1][r] = _mm512_setzero_si512();
    for (int i = 0; i < Form::sums / 2; ++i) {
        __m512i part[2][2][ROW_GROUP];
        unroll<2>([&](auto j) __attribute__((always_inline)) {
            constexpr int J = decltype(j)::value;
            const int unit = UNITS_OF_PAIR * i + J * (UNITS_OF_PAIR - 1);
            if (J == 0 || UNITS_OF_PAIR == 2)
                for (FetchAhead& ahead : pair.ahead) ahead.fetch();
            const TileSource<Form> sources[2] = {{tiles[0] + unit}, {tiles[1] + unit}};
            sum_pair_quads<Form::has_half_scales ? 4 * J : 0, QUADS_OF_SUM, J * ODD_START>(
                sources, reinterpret_cast<const int8_t*>(a + unit * ROW_UNIT_BYTES * ROW_GROUP),
                terms + (2 * i + J) * ROW_GROUP, part[J]);
        });
        for (int r = 0; r < ROW_GROUP; ++r) {
            const __m512i multiplier = broadcast_i32(terms + (Form::multipliers_at + i) * ROW_GROUP + r);
            for (int p = 0; p < 2; ++p) {
                const __m512i f =
                    _mm512_mulhrs_epi16(load_bytes(tiles[p]->block.scales + 2 * PANEL_COLS * i), multiplier);
                sum[p][r] = add_products(sum[p][r], as_pairs<Form::shift>(part[0][p][r], part[1][p][r]), f);
            }
        }
    }
    for (int p = 0; p < 2; ++p)
        for (int r = 0; r < ROW_GROUP; ++r) {
            __m512i mins = _mm512_setzero_si512();
            for (int i = 0; i < (Form::mins ? Form::units / 2 : 0); ++i)
                mins = add_products(mins, load_bytes(tiles[p]->block.mins + 2 * PANEL_COLS * i),
                                    broadcast_i32(terms + (Form::mins_at + i) * ROW_GROUP + r));
            float* const y = pair.sums[p] + PANEL_COLS * r;
            store(y, block_end(tiles[p]->block)
                         .add(load(y), {_mm512_cvtepi32_ps(sum[p][r])}, {_mm512_cvtepi32_ps(mins)},
                              as_float(terms[Form::scale_at * ROW_GROUP + r])));
        }
}

// multiply_units for two panels: each broadcast serves two products, and 16 chains of them hide the latency. The sums
// stay in memory, because the chains fill the registers.
template <typename Form>
__attribute__((noinline)) void multiply_tile_pair(TilePair<Form> pair, int units, const uint8_t* a,
                                                  const int32_t* terms) {
    if constexpr (Form::sums_blocks) {
        for (int u = 0; u < units; u += Form::units, terms += Form::units * Form::term_count * ROW_GROUP)
            multiply_block_pair(pair, {pair.of[0] + u, pair.of[1] + u}, a + u * ROW_UNIT_BYTES * ROW_GROUP, terms);
        return;
    } else {
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
}
#endif

}  // namespace
}  // namespace octavo
