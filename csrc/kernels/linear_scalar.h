// Products of quantized panels in plain C++: a readable version of linear_format.h.
#pragma once

#include "linear_units.h"

namespace octavo {
namespace {

template <typename F>
struct PackedSource : PackedUnits<F> {
    using Form = FormOf<F>;
    const WeightType& type;
    PackedSource(const Panel& panel, int first, int count) : PackedUnits<F>(panel, first, count), type(panel.type) {}
};

// Unpacked units. Codes: u - zero, [32][16].
template <typename Form>
struct TileSource : TileUnits<Form> {};

template <typename F>
void unpack_unit(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    const WeightType& type = source.type;
    for (int k = 0; k < UNIT_K; ++k)
        for (int n = 0; n < PANEL_COLS; ++n)
            tile.codes[PANEL_COLS * k + n] =
                static_cast<int16_t>(unit_code<F>(type.table, source.codes(), k, n) - type.zero);
    if constexpr (F::sums_blocks) {
        if (source.unit == 0) read_block<F>(source, tile.block);
    } else {
        store(tile.scales, source.scales());
        for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
        for (int j = 0; F::has_half_scales && j < 2; ++j)
            for (int n = 0; n < PANEL_COLS; ++n)
                tile.half_scales[j][n] = static_cast<float>(half_scale<F>(source.half_scale_bytes(j), j, n));
    }
}

// sum[n] += the sum of one half unit.
template <typename Form>
inline void add_half(const UnitTile<Form>& tile, const int8_t* a, int half, int32_t (&sum)[PANEL_COLS]) {
    for (int k = 16 * half; k < 16 * half + 16; ++k)
        for (int n = 0; n < PANEL_COLS; ++n) sum[n] += tile.codes[PANEL_COLS * k + n] * a[k];
}
inline F32x16 to_floats(const int32_t (&sum)[PANEL_COLS]) {
    return each_lane([&](int n) { return static_cast<float>(sum[n]); });
}
template <typename Form>
inline F32x16 half_sums(const UnitTile<Form>& tile, const int8_t* a, int half) {
    int32_t sum[PANEL_COLS] = {};
    add_half(tile, a, half, sum);
    return to_floats(sum);
}

// I as in linear_format.h: float sums and products of integers are exact.
template <typename Form>
__attribute__((noinline)) F32x16 unit_sums(const UnitTile<Form>& tile, const int8_t* a) {
    const F32x16 first = half_sums(tile, a, 0), second = half_sums(tile, a, 1);
    if constexpr (Form::has_half_scales)
        return fma(second, load(tile.half_scales[1]), first * load(tile.half_scales[0]));
    else
        return first + second;
}

// y after a super-block of one row. a: its first unit of r rows.
template <typename Form>
__attribute__((noinline)) F32x16 multiply_block(const UnitTile<Form>* tiles, const uint8_t* a, const int32_t* terms,
                                                int row, int r, F32x16 y) {
    const BlockFactors<Form>& factors = tiles->block;
    const auto low = [&](int term) { return static_cast<int16_t>(terms[term * r + row]); };
    const auto high = [&](int term) { return terms[term * r + row] >> 16; };
    int32_t whole[PANEL_COLS] = {}, mins[PANEL_COLS] = {};
    for (int i = 0; i < Form::sums; ++i) {
        const int unit = i * Form::units / Form::sums, sign = i % 2 ? -1 : 1;
        const int8_t* const codes = reinterpret_cast<const int8_t*>(a + unit * r * ROW_UNIT_BYTES) + 32 * row;
        int32_t sum[PANEL_COLS] = {};
        add_half(tiles[unit], codes, i % 2, sum);
        if (Form::sums == Form::units) add_half(tiles[unit], codes, 1 - i % 2, sum);
        const int multiplier = i % 2 ? high(Form::multipliers_at + i / 2) : low(Form::multipliers_at + i / 2);
        for (int n = 0; n < PANEL_COLS; ++n) {
            const int f = (factors.scales[PANEL_COLS * i + n] * multiplier + (1 << 14)) >> 15;
            whole[n] += f * (sign * sum[n] >> Form::shift);
        }
    }
    for (int u = 0; u < (Form::mins ? Form::units : 0); ++u)
        for (int n = 0; n < PANEL_COLS; ++n)
            mins[n] +=
                factors.mins[PANEL_COLS * u + n] * (u % 2 ? high(Form::mins_at + u / 2) : low(Form::mins_at + u / 2));
    return block_end(factors).add(y, to_floats(whole), to_floats(mins), as_float(terms[Form::scale_at * r + row]));
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    if constexpr (Form::sums_blocks) {
        for (int u = 0; u < units; u += Form::units, terms += Form::units * Form::term_count * R)
            for (int r = 0; r < R; ++r)
                store(c + PANEL_COLS * r, multiply_block(source.tile + u, a + u * R * ROW_UNIT_BYTES, terms, r, R,
                                                         load(c + PANEL_COLS * r)));
    } else {
        for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
            const UnitFactors<Form> factors(source);
            for (int r = 0; r < R; ++r) {
                const F32x16 sum = unit_sums(*source.tile, reinterpret_cast<const int8_t*>(a) + 32 * r);
                store(c + PANEL_COLS * r, factors.add(load(c + PANEL_COLS * r), sum, a, terms, r, R));
            }
        }
    }
}

}  // namespace
}  // namespace octavo
