// Products of quantized panels with AVX2: vpmaddubsw (unsigned codes x signed activations), with sums in int16 while
// they fit. A pair of products is at most 2 * code * 127, and a sum over n quads n times that: 8 quads of codes below
// 16, 4 of codes below 32, 2 of codes below 64. Before a zero point is subtracted, the sum may exceed int16, because
// additions wrap around and the final value fits: 16 * 16 * 127 and 8 * 32 * 127 are below 2^15. Byte codes are
// multiplied as |w| * (sign(w) a), because no sum of two pairs fits. In a tile the sign is a mask m, 0 or -1, and |w| *
// (a ^ m) is w a minus |w| if w is negative; a core executes more `xor` than `sign` at once.
#pragma once

#include "linear_codes_avx2.h"

namespace octavo {
namespace {

// Unpacks a unit's byte codes into magnitudes and signs, and the sums of the negative ones.
template <typename F>
void unpack_signed(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    constexpr int PART = FormOf<F>::has_float_scales ? QUADS / 2 : QUADS;  // quads per sum
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
    if constexpr (F::sums_blocks) {
        if (source.unit == 0) read_block<F>(source, tile.block);
    } else {
        keeping.scales();
        for (int j = 0; j < F::mins; ++j) keeping.mins(j);
        for (int j = 0; F::has_half_scales && j < 2; ++j) keeping.half_scales(j);
    }
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
            // Codes below 64 always have a zero point, so four quads always fit.
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

// As above, for byte codes of quads [First, First + Count): a pair of products |w| * (sign(w) a) fits into int16.
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

// As above, for a tile.
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

// I as in linear_format.h, if the scales of half units are floats.
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

// c [R][16] += the value of a unit's sums. sum(r): the sums of row r as floats.
template <int R, typename Form, typename Sum>
__attribute__((always_inline)) inline void add_sums(const UnitFactors<Form>& factors, const Sum& sum, const uint8_t* a,
                                                    const int32_t* terms, float* c) {
    // The integer sums need the registers, so c is updated in the L1 cache instead of in additional spill slots.
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

// Sum i of the current super-block of source and a, odd if J is 1, times `factor`.
template <int R, int J, typename Source>
__attribute__((always_inline)) inline void block_sum(const Source& source, const uint8_t* a, const int32_t* terms,
                                                     int i, int factor, __m256i (&sum)[R][2]) {
    using Form = typename Source::Form;
    const __m256i factors = _mm256_set1_epi16(static_cast<short>(factor));
    const int8_t* const codes = reinterpret_cast<const int8_t*>(a);
    if constexpr (Form::has_half_scales) {
        add_quads<R, 4 * J, 4>(source, codes, sum);
        add_terms<R>(terms + i * R, sum);
    } else {
        add_quads<R, 0, Form::in_halves ? 4 : 8>(source, codes, sum);
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) sum[r][h] = _mm256_madd_epi16(sum[r][h], factors);
    if constexpr (Form::in_halves && !Form::has_half_scales) {
        __m256i rest[R][2];
        add_quads<R, 4, 4>(source, codes, rest);
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < 2; ++h) sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(rest[r][h], factors));
    }
}

// whole[r] += sums 2 pair and 2 pair + 1 of a super-block times their scales. terms: of the super-block. Leaves the
// source at the last unit and `a` at the unit after it.
template <int R, typename Source>
__attribute__((always_inline)) inline void add_pair(Source& source, const int16_t* all_scales, const uint8_t*& a,
                                                    const int32_t* terms, int pair, __m256i (&whole)[R][2]) {
    using Form = typename Source::Form;
    __m256i first[R][2], second[R][2];
    source.prefetch();
    block_sum<R, 0>(source, a, terms, 2 * pair, 1, first);
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) first[r][h] = pin(_mm256_srli_epi32(first[r][h], Form::shift));
    if constexpr (!Form::has_half_scales) {
        a += ROW_UNIT_BYTES * R;
        source.next();
        source.prefetch();
    }
    // The factor moves the sum to its half of a pair.
    block_sum<R, 1>(source, a, terms, 2 * pair + 1, Form::shift > 0 ? -(1 << (16 - Form::shift)) : -1, second);
    a += ROW_UNIT_BYTES * R;
    const int16_t* const at = all_scales + 2 * PANEL_COLS * pair;
    const int unit = 2 * pair + 1;
    const __m256i scales[2] = {
        Form::has_half_scales ? load_bytes(at) : source.template block_scales<0>(pair, unit),
        Form::has_half_scales ? load_bytes(at + PANEL_COLS) : source.template block_scales<1>(pair, unit)};
    for (int r = 0; r < R; ++r) {
        const __m256i multiplier = broadcast_i32(terms + (Form::multipliers_at + pair) * R + r);
        for (int h = 0; h < 2; ++h) {
            const __m256i high = Form::shift > 0 ? second[r][h] : _mm256_slli_epi32(second[r][h], 16);
            const __m256i f = _mm256_mulhrs_epi16(scales[h], multiplier);
            whole[r][h] =
                _mm256_add_epi32(whole[r][h], _mm256_madd_epi16(_mm256_blend_epi16(first[r][h], high, 0xaa), f));
        }
    }
}

// c [R][16] += a * a super-block that is summed in integers. Leaves the source at the next super-block.
template <int R, typename Source>
__attribute__((always_inline)) inline void multiply_block(Source& source, const uint8_t* a, const int32_t* terms,
                                                          float* c) {
    using Form = typename Source::Form;
    // Scales of half units are all read at the start of their super-block; one at a time, each would wait for memory.
    alignas(64) int16_t memory[Form::sums * PANEL_COLS];
    const int16_t* const scales = Form::has_half_scales ? source.all_scales(memory) : memory;
    __m256i whole[R][2];
    for (int r = 0; r < R; ++r) whole[r][0] = whole[r][1] = _mm256_setzero_si256();
    for (int pair = 0; pair < Form::sums / 2; ++pair) {
        if (pair > 0) source.next();
        add_pair<R>(source, scales, a, terms, pair, whole);
    }
    constexpr int LAST = Form::units - 1;
    __m256i mins[R][2];
    for (int r = 0; r < R; ++r) mins[r][0] = mins[r][1] = _mm256_setzero_si256();
    for (int p = 0; p < (Form::mins ? Form::units / 2 : 0); ++p) {
        const __m256i m[2] = {source.template block_mins<0>(p, LAST), source.template block_mins<1>(p, LAST)};
        for (int r = 0; r < R; ++r) {
            const __m256i sums = broadcast_i32(terms + (Form::mins_at + p) * R + r);
            for (int h = 0; h < 2; ++h) mins[r][h] = _mm256_add_epi32(mins[r][h], _mm256_madd_epi16(m[h], sums));
        }
    }
    const BlockEnd<Form> end = source.end(LAST);
    for (int r = 0; r < R; ++r)
        store(c + PANEL_COLS * r, end.add(load(c + PANEL_COLS * r), to_floats(whole[r]), to_floats(mins[r]),
                                          as_float(terms[Form::scale_at * R + r])));
    source.next();
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    if constexpr (Form::sums_blocks) {
        for (int u = 0; u < units; u += Form::units, terms += Form::units * Form::term_count * R)
            multiply_block<R>(source, a + u * ROW_UNIT_BYTES * R, terms, c);
    } else {
        for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
            source.prefetch();
            multiply_unit<R>(source, a, terms, c);
        }
    }
}

// c [4][16] += a * `units` units of the source, for a whole group. Stores the unpacked units in `tiles`.
template <typename F>
void multiply_keeping(PackedSource<F>& source, int units, ImageGroup a, const int32_t* terms, float* c,
                      UnitTile<FormOf<F>>* tiles) {
    constexpr int TERMS = FormOf<F>::term_count * ROW_GROUP;
    if constexpr (F::sums_blocks) {
        KeepingBlock<F> keeping{source, tiles};
        for (int u = 0; u < units; u += FormOf<F>::units)
            multiply_block<ROW_GROUP>(keeping, a.unit(u), terms + u * TERMS, c);
        source = keeping.packed;
    } else {
        for (int u = 0; u < units; ++u, source.next()) {
            source.prefetch();
            if constexpr (FormOf<F>::is_wide) {
                unpack_unit<F>(source, tiles[u]);
                multiply_unit<ROW_GROUP>(TileSource<FormOf<F>>{tiles + u}, a.unit(u), terms + u * TERMS, c);
            } else {
                multiply_unit<ROW_GROUP>(KeepingSource<F>{source, tiles[u]}, a.unit(u), terms + u * TERMS, c);
            }
        }
    }
}

}  // namespace
}  // namespace octavo
