// Products of quantized panels on ARM, with four columns per register.
//
//   neon      smlal: sums of products in int16 while they fit. A product is at most code * 128, and a sum over n quads
//             is at most n times that: 8 quads of codes below 32, 4 of codes below 64, 2 of signed bytes
//   dotprod   sdot: four columns x 4 k of one row per instruction, in int32 from the start
//   i8mm      smmla: two columns x 8 k of two rows; sdot if one row reads the packed panel
// All codes fit into signed bytes; zero points are subtracted by terms.
#pragma once

#include "linear_units.h"

namespace octavo {
namespace {

#if defined(OCTAVO_ISA_i8mm)
constexpr bool IN_PAIRS = true;  // unpacked codes are stored in pairs of quads, with 8 k of a column together
#else
constexpr bool IN_PAIRS = false;
#endif

constexpr int COL_GROUPS = 4;  // registers of 4 columns per panel

// Keeps the products in source order. Otherwise the compiler would process the rows one after the other, hold all
// weights in registers, and spill them.
template <typename V>
inline V pin(V x) {
    __asm__ volatile("" : "+w"(x));
    return x;
}

// Moves the bits at `from` of every byte to `to` and masks them.
template <int from, int to>
inline uint8x16_t move_bits(uint8x16_t x, int mask) {
    if constexpr (from < to) x = vshlq_n_u8(x, to - from);
    if constexpr (from > to) {
        x = vshrq_n_u8(x, from - to);
        if (mask == 255 >> (from - to)) return x;  // no other bits remain
    }
    return vandq_u8(x, vdupq_n_u8(static_cast<uint8_t>(mask)));
}

// The 16 codes of quad Q of 4 in a chunk of triples.
template <int Q>
inline uint8x16_t unpack_triples(const uint8_t* chunk) {
    if constexpr (Q < 3) return vandq_u8(vld1q_u8(chunk + 64 * Q), vdupq_n_u8(63));
    // Each shift inserts its bits below those already there.
    const uint8x16_t low = vld1q_u8(chunk), middle = vld1q_u8(chunk + 64), high = vld1q_u8(chunk + 128);
    return vshrq_n_u8(vsriq_n_u8(high, vsriq_n_u8(middle, low, 2), 2), 2);
}

// The code table, if the format has one.
template <typename F>
inline int8x16_t load_table(const WeightType& type) {
    if constexpr (!F::has_table) return vdupq_n_s8(0);
    return vld1q_s8(type.table);
}

// The codes of quad Q, columns 4 group .. 4 group + 3.
template <typename F, int Q>
inline int8x16_t unpack_quad(const uint8_t* codes, [[maybe_unused]] int8x16_t table, int group) {
    codes += 16 * group;
    if constexpr (F::bits == 8) return vreinterpretq_s8_u8(vld1q_u8(codes + 64 * Q));
    if constexpr (F::has_triples) return vreinterpretq_s8_u8(unpack_triples<Q % 4>(codes + TRIPLE_BYTES * (Q / 4)));
    uint8x16_t u = vdupq_n_u8(0);
    if constexpr (F::has_nibbles) u = move_bits<4 * (Q % 2), 0>(vld1q_u8(codes + 64 * (Q / 2)), 15);
    if constexpr (F::has_table) return vqtbl1q_s8(table, u);
    if constexpr (F::has_pairs) u = move_bits<2 * (Q % 4), 0>(vld1q_u8(codes + 64 * (Q / 4)), 3);
    if constexpr (F::has_bits) {
        const uint8x16_t bits = vld1q_u8(codes + F::bits_offset);
        u = vorrq_u8(u, move_bits<Q, F::bits_place>(bits, 1 << F::bits_place));
    }
    return vreinterpretq_s8_u8(u);
}

// Two columns (the left or `right` two of four) x 8 k of two quads, for smmla.
inline int8x16_t pair_quads(int8x16_t even, int8x16_t odd, bool right) {
    const int32x4_t a = vreinterpretq_s32_s8(even), b = vreinterpretq_s32_s8(odd);
    return vreinterpretq_s8_s32(right ? vzip2q_s32(a, b) : vzip1q_s32(a, b));
}

struct I32x16 {
    int32x4_t v[COL_GROUPS];
};

// As above, for a grid whose vectors have been looked up.
template <typename F, int Q>
inline int8x16_t sign_vectors(const uint8_t* vectors, [[maybe_unused]] const uint8_t* codes, int group) {
    const int8x16_t w = vreinterpretq_s8_u8(vld1q_u8(vectors + 16 * group));
    if constexpr (!F::has_signs) return w;
    const uint8_t* const signs = codes + F::signs_offset + 8 * Q + 2 * group;
    const uint8x16_t bits = vcombine_u8(vdup_n_u8(signs[0]), vdup_n_u8(signs[1]));
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    return vbslq_s8(vtstq_u8(bits, bit), vnegq_s8(w), w);
}

// scale_j of 16 columns as floats.
template <typename F>
inline F32x16 load_float_scales(const uint8_t* p, [[maybe_unused]] int half) {
    if constexpr (F::has_e4m3_scales) {
        return load_e4m3(p);
    } else {
        const uint8x16_t bytes = vld1q_u8(p);
        const uint8x16_t n = half == 1 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
        uint8_t odd[PANEL_COLS];
        vst1q_u8(odd, vaddq_u8(vaddq_u8(n, n), vdupq_n_u8(1)));
        return load_u8(odd);
    }
}

// scale_j of 16 columns.
template <typename F>
inline I32x16 load_half_scales(const uint8_t* p) {
    uint8x16_t bytes = vld1q_u8(p);
    if constexpr (F::scales == Scales::u4_per_half_unit) bytes = vandq_u8(bytes, vdupq_n_u8(15));
    const int8x16_t x = vreinterpretq_s8_u8(bytes);
    const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
    return {{vmovl_s16(vget_low_s16(lo)), vmovl_high_s16(lo), vmovl_s16(vget_low_s16(hi)), vmovl_high_s16(hi)}};
}

// Weights straight from the packed panel.
template <typename F>
struct PackedSource : PackedUnits<F> {
    using Form = FormOf<F>;
    int8x16_t table;
    PackedSource(const Panel& panel, int first, int count)
        : PackedUnits<F>(panel, first, count), table(load_table<F>(panel.type)) {}
    template <int Q>
    int8x16_t quad(int group) const {
        if constexpr (F::is_grid)
            return sign_vectors<F, Q>(this->vectors(Q), this->codes(), group);
        else
            return unpack_quad<F, Q>(this->codes(), table, group);
    }
    // Quads 2 P and 2 P + 1.
    template <int P>
    int8x16_t pair(int group, bool right) const {
        return pair_quads(quad<2 * P>(group), quad<2 * P + 1>(group), right);
    }
    // The factors of the super-block that begins here, read into `memory`.
    const BlockFactors<Form>& read_factors(BlockFactors<Form>& memory) const {
        read_block<F>(*this, memory);
        return memory;
    }
    auto half_scales(int half) const {
        if constexpr (FormOf<F>::has_float_scales)
            return load_float_scales<F>(this->half_scale_bytes(half), half);
        else
            return load_half_scales<F>(this->half_scale_bytes(half));
    }
};

// Unpacked units. The codes are quads, or pairs of quads as made by pair_quads.
template <typename Form>
struct TileSource : TileUnits<Form> {
    const BlockFactors<Form>& read_factors(BlockFactors<Form>&) const { return this->block(0); }
#if defined(OCTAVO_ISA_i8mm)
    template <int P>
    int8x16_t pair(int group, bool right) const {
        return vld1q_s8(this->tile->codes + 128 * P + 32 * group + 16 * right);
    }
#else
    template <int Q>
    int8x16_t quad(int group) const {
        return vld1q_s8(this->tile->codes + 64 * Q + 16 * group);
    }
#endif
    auto half_scales(int half) const {
        const auto* const p = this->tile->half_scales[half];
        if constexpr (Form::has_float_scales)
            return load(p);
        else
            return I32x16{{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
    }
};

template <typename Form>
inline void store_half_scales(F32x16 scales, UnitTile<Form>& tile, int half) {
    store(tile.half_scales[half], scales);
}
template <typename Form>
inline void store_half_scales(const I32x16& scales, UnitTile<Form>& tile, int half) {
    for (int g = 0; g < COL_GROUPS; ++g) vst1q_s32(tile.half_scales[half] + 4 * g, scales.v[g]);
}

template <typename F>
void unpack_unit(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    unroll<QUADS / 2>([&](auto p) __attribute__((always_inline)) {
        constexpr int P = decltype(p)::value;
        for (int g = 0; g < COL_GROUPS; ++g) {
            const int8x16_t even = source.template quad<2 * P>(g);
            const int8x16_t odd = source.template quad<2 * P + 1>(g);
            if constexpr (IN_PAIRS) {
                vst1q_s8(tile.codes + 128 * P + 32 * g, pair_quads(even, odd, false));
                vst1q_s8(tile.codes + 128 * P + 32 * g + 16, pair_quads(even, odd, true));
            } else {
                vst1q_s8(tile.codes + 128 * P + 16 * g, even);
                vst1q_s8(tile.codes + 128 * P + 64 + 16 * g, odd);
            }
        }
    });
    if constexpr (F::sums_blocks) {
        if (source.unit == 0) read_block<F>(source, tile.block);
    } else {
        store(tile.scales, source.scales());
        for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
        for (int j = 0; j < (F::has_half_scales ? 2 : 0); ++j) store_half_scales(source.half_scales(j), tile, j);
    }
}

#if defined(OCTAVO_ISA_neon)

// sum[r] += codes of quads [First, First + Count) x activations of row r.
template <int R, int First, int Count, typename Source>
inline void add_quads(const Source& source, const int8_t* a, I32x16 (&sum)[R]) {
    constexpr int FITTING = Source::Form::is_wide ? 2 : Count;  // quads whose sum fits into int16
    // Half of the columns at a time, so that the sums of four rows stay in registers.
    for (int g = 0; g < COL_GROUPS; g += 2)
        unroll<Count / FITTING>([&](auto part) __attribute__((always_inline)) {
            int16x8_t acc[R][4];
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 4; ++i) acc[r][i] = vdupq_n_s16(0);
            unroll<FITTING>([&](auto i) __attribute__((always_inline)) {
                constexpr int Q = First + decltype(part)::value * FITTING + decltype(i)::value;
                const int8x16_t w0 = source.template quad<Q>(g), w1 = source.template quad<Q>(g + 1);
                for (int r = 0; r < R; ++r) {
                    int32_t quad;
                    std::memcpy(&quad, a + 32 * r + 4 * Q, 4);
                    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(quad));
                    acc[r][0] = pin(vmlal_s8(acc[r][0], vget_low_s8(w0), vget_low_s8(x)));
                    acc[r][1] = pin(vmlal_high_s8(acc[r][1], w0, x));
                    acc[r][2] = pin(vmlal_s8(acc[r][2], vget_low_s8(w1), vget_low_s8(x)));
                    acc[r][3] = pin(vmlal_high_s8(acc[r][3], w1, x));
                }
            });
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 2; ++i) {
                    const int32x4_t columns = vpaddq_s32(vpaddlq_s16(acc[r][2 * i]), vpaddlq_s16(acc[r][2 * i + 1]));
                    sum[r].v[g + i] = vaddq_s32(sum[r].v[g + i], columns);
                }
        });
}

#else

// sum[r] += codes of quads [First, First + Count) x activations of row r.
template <int R, int First, int Count, typename Source>
inline void add_dots(const Source& source, const int8_t* a, I32x16 (&sum)[R]) {
    unroll<Count / 4>([&](auto part) __attribute__((always_inline)) {
        constexpr int Q0 = First + 4 * decltype(part)::value;
        int8x16_t x[R];  // four quads per row
        for (int r = 0; r < R; ++r) x[r] = vld1q_s8(a + 32 * r + 4 * Q0);
        unroll<4>([&](auto i) __attribute__((always_inline)) {
            constexpr int I = decltype(i)::value;
            for (int g = 0; g < COL_GROUPS; ++g) {
                const int8x16_t w = source.template quad<Q0 + I>(g);
                for (int r = 0; r < R; ++r) sum[r].v[g] = pin(vdotq_laneq_s32(sum[r].v[g], w, x[r], I));
            }
        });
    });
}

#if defined(OCTAVO_ISA_i8mm)

// As above, by pairs of rows; an odd row is paired with itself. The results of a product are in one register in the
// order (row 0, column 0), (0, 1), (1, 0), (1, 1).
template <int R, int First, int Count, typename Source>
inline void add_matrices(const Source& source, const int8_t* a, I32x16 (&sum)[R]) {
    constexpr int PAIRS = (R + 1) / 2;
    int32x4_t acc[PAIRS][2 * COL_GROUPS];
    for (int p = 0; p < PAIRS; ++p)
        for (int i = 0; i < 2 * COL_GROUPS; ++i) acc[p][i] = vdupq_n_s32(0);
    unroll<Count / 2>([&](auto i) __attribute__((always_inline)) {
        constexpr int P = First / 2 + decltype(i)::value;
        int8x16_t x[PAIRS];
        for (int p = 0; p < PAIRS; ++p) {
            const int8_t *const even = a + 64 * p + 8 * P, *const odd = 2 * p + 1 < R ? even + 32 : even;
            x[p] = vcombine_s8(vld1_s8(even), vld1_s8(odd));
        }
        for (int g = 0; g < COL_GROUPS; ++g) {
            const int8x16_t left = source.template pair<P>(g, false), right = source.template pair<P>(g, true);
            for (int p = 0; p < PAIRS; ++p) {
                acc[p][2 * g] = pin(vmmlaq_s32(acc[p][2 * g], x[p], left));
                acc[p][2 * g + 1] = pin(vmmlaq_s32(acc[p][2 * g + 1], x[p], right));
            }
        }
    });
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < COL_GROUPS; ++g) {
            const int64x2_t left = vreinterpretq_s64_s32(acc[r / 2][2 * g]);
            const int64x2_t right = vreinterpretq_s64_s32(acc[r / 2][2 * g + 1]);
            const int64x2_t row = r % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right);
            sum[r].v[g] = vaddq_s32(sum[r].v[g], vreinterpretq_s32_s64(row));
        }
}

template <typename Source>
constexpr bool IS_TILE = false;
template <typename Form>
constexpr bool IS_TILE<TileSource<Form>> = true;

template <int R, int First, int Count, typename Source>
inline void add_quads(const Source& source, const int8_t* a, I32x16 (&sum)[R]) {
    if constexpr (R == 1 && !IS_TILE<Source>)
        add_dots<R, First, Count>(source, a, sum);
    else
        add_matrices<R, First, Count>(source, a, sum);
}

#else

template <int R, int First, int Count, typename Source>
inline void add_quads(const Source& source, const int8_t* a, I32x16 (&sum)[R]) {
    add_dots<R, First, Count>(source, a, sum);
}

#endif
#endif

// sum[r] = terms[r] in all columns if the type has a zero point, else 0.
template <typename Form, int R>
inline void start_sums([[maybe_unused]] const int32_t* terms, I32x16 (&sum)[R]) {
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < COL_GROUPS; ++g) sum[r].v[g] = vdupq_n_s32(Form::has_zero_terms ? terms[r] : 0);
}

inline F32x16 to_floats(const I32x16& sum) {
    return each_register([&](int g) { return vcvtq_f32_s32(sum.v[g]); });
}

// I as in linear_format.h, if the scales of half units are floats.
template <int R, typename Source>
inline void scaled_sums(const Source& source, const int8_t* a, const int32_t* terms, F32x16 (&sum)[R]) {
    using Form = typename Source::Form;
    unroll<2>([&](auto half) __attribute__((always_inline)) {
        constexpr int J = decltype(half)::value;
        I32x16 part[R];
        start_sums<Form>(terms + J * R, part);
        add_quads<R, 4 * J, 4>(source, a, part);
        const F32x16 scales = source.half_scales(J);
        for (int r = 0; r < R; ++r)
            sum[r] = J == 0 ? to_floats(part[r]) * scales : fma(to_floats(part[r]), scales, sum[r]);
    });
}

// As above, in int32.
template <int R, typename Source>
inline void unit_sums(const Source& source, const int8_t* a, const int32_t* terms, I32x16 (&sum)[R]) {
    using Form = typename Source::Form;
    start_sums<Form>(terms, sum);
    if constexpr (!Form::has_half_scales) {
        add_quads<R, 0, 8>(source, a, sum);
    } else {
        I32x16 second[R];
        add_quads<R, 0, 4>(source, a, sum);
        const I32x16 s0 = source.half_scales(0);
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < COL_GROUPS; ++g) sum[r].v[g] = vmulq_s32(sum[r].v[g], s0.v[g]);
        start_sums<Form>(terms + R, second);
        add_quads<R, 4, 4>(source, a, second);
        const I32x16 s1 = source.half_scales(1);
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < COL_GROUPS; ++g) sum[r].v[g] = vmlaq_s32(sum[r].v[g], second[r].v[g], s1.v[g]);
    }
}

// Repeats pair `odd` of the 16-bit numbers in a term.
inline int16x8_t repeat_term(int32_t term, int odd) {
    return vdupq_n_s16(static_cast<int16_t>(odd ? term >> 16 : term));
}

// whole[r] += sum `at` of a super-block, over `Count` quads, times its scales. terms: of the super-block.
template <int R, int First, int Count, typename Source>
inline void add_scaled(const Source& source, const BlockFactors<typename Source::Form>& factors, const int8_t* a,
                       const int32_t* terms, int at, I32x16 (&whole)[R]) {
    using Form = typename Source::Form;
    I32x16 sum[R];
    start_sums<Form>(terms + at * R, sum);
    add_quads<R, First, Count>(source, a, sum);
    const int16x8_t low = vld1q_s16(factors.scales + PANEL_COLS * at);
    const int16x8_t high = vld1q_s16(factors.scales + PANEL_COLS * at + 8);
    for (int r = 0; r < R; ++r) {
        const int16x8_t m = repeat_term(terms[(Form::multipliers_at + at / 2) * R + r], at % 2);
        const int16x8_t f[2] = {vqrdmulhq_s16(low, m), vqrdmulhq_s16(high, m)};
        for (int g = 0; g < COL_GROUPS; ++g) {
            const int32x4_t part = at % 2 ? vnegq_s32(sum[r].v[g]) : sum[r].v[g];
            const int32x4_t wide = g % 2 ? vmovl_high_s16(f[g / 2]) : vmovl_s16(vget_low_s16(f[g / 2]));
            whole[r].v[g] = vmlaq_s32(whole[r].v[g], vshlq_s32(part, vdupq_n_s32(-Form::shift)), wide);
        }
    }
}

// c [R][16] += a * a super-block that is summed in integers. Leaves the source at the next super-block.
template <int R, typename Source>
inline void multiply_block(Source& source, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    BlockFactors<Form> memory;
    const BlockFactors<Form>& factors = source.read_factors(memory);
    I32x16 whole[R];
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < COL_GROUPS; ++g) whole[r].v[g] = vdupq_n_s32(0);
    for (int unit = 0; unit < Form::units; ++unit, a += ROW_UNIT_BYTES * R, source.next()) {
        source.prefetch();
        const int8_t* const codes = reinterpret_cast<const int8_t*>(a);
        if constexpr (Form::has_half_scales) {
            add_scaled<R, 0, 4>(source, factors, codes, terms, 2 * unit, whole);
            add_scaled<R, 4, 4>(source, factors, codes, terms, 2 * unit + 1, whole);
        } else {
            add_scaled<R, 0, 8>(source, factors, codes, terms, unit, whole);
        }
    }
    for (int r = 0; r < R; ++r) {
        I32x16 mins;
        for (int g = 0; g < COL_GROUPS; ++g) mins.v[g] = vdupq_n_s32(0);
        for (int u = 0; u < (Form::mins ? Form::units : 0); ++u) {
            const int16x8_t sums = repeat_term(terms[(Form::mins_at + u / 2) * R + r], u % 2);
            for (int g = 0; g < COL_GROUPS; ++g)
                mins.v[g] = vmlal_s16(mins.v[g], vld1_s16(factors.mins + PANEL_COLS * u + 4 * g), vget_low_s16(sums));
        }
        store(c + PANEL_COLS * r, block_end(factors).add(load(c + PANEL_COLS * r), to_floats(whole[r]), to_floats(mins),
                                                         as_float(terms[Form::scale_at * R + r])));
    }
}

// As above, for units with their own scales.
template <int R, typename Source>
inline void multiply_scaled_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
        source.prefetch();
        const int8_t* const codes = reinterpret_cast<const int8_t*>(a);
        F32x16 sum[R];
        if constexpr (Form::has_float_scales) {
            scaled_sums<R>(source, codes, terms, sum);
        } else {
            I32x16 whole[R];
            unit_sums<R>(source, codes, terms, whole);
            for (int r = 0; r < R; ++r) sum[r] = to_floats(whole[r]);
        }
        const UnitFactors<Form> factors(source);
        // The integer sums need the registers, so c is updated in the L1 cache instead of in additional spill slots.
        if (R > 2) __asm__("" : "+r"(c));
        for (int r = 0; r < R; ++r)
            store(c + PANEL_COLS * r, factors.add(load(c + PANEL_COLS * r), sum[r], a, terms, r, R));
    }
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    if constexpr (Form::sums_blocks) {
        for (int u = 0; u < units; u += Form::units)
            multiply_block<R>(source, a + u * ROW_UNIT_BYTES * R, terms + u * Form::term_count * R, c);
    } else {
        multiply_scaled_units<R>(source, units, a, terms, c);
    }
}

}  // namespace
}  // namespace octavo
