// Products of quantized panels in plain C++: the readable form of linear_format.h.
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
    store(tile.scales, source.scales());
    for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
    for (int j = 0; F::has_half_scales && j < 2; ++j)
        for (int n = 0; n < PANEL_COLS; ++n)
            tile.half_scales[j][n] = static_cast<float>(half_scale<F>(source.half_scale_bytes(j), j, n));
}

// The sums of one half unit.
template <typename Form>
inline F32x16 half_sums(const UnitTile<Form>& tile, const int8_t* a, int half) {
    int32_t sum[PANEL_COLS] = {};
    for (int k = 16 * half; k < 16 * half + 16; ++k)
        for (int n = 0; n < PANEL_COLS; ++n) sum[n] += tile.codes[PANEL_COLS * k + n] * a[k];
    return each_lane([&](int n) { return static_cast<float>(sum[n]); });
}

// I of linear_format.h: float sums and products of whole numbers are exact.
template <typename Form>
__attribute__((noinline)) F32x16 unit_sums(const UnitTile<Form>& tile, const int8_t* a) {
    const F32x16 first = half_sums(tile, a, 0), second = half_sums(tile, a, 1);
    if constexpr (Form::has_half_scales)
        return fma(second, load(tile.half_scales[1]), first * load(tile.half_scales[0]));
    else
        return first + second;
}

template <int R, typename Source>
inline void multiply_units(Source source, int units, const uint8_t* a, const int32_t* terms, float* c) {
    using Form = typename Source::Form;
    for (int u = 0; u < units; ++u, source.next(), a += ROW_UNIT_BYTES * R, terms += Form::term_count * R) {
        const UnitFactors<Form> factors(source);
        for (int r = 0; r < R; ++r) {
            const F32x16 sum = unit_sums(*source.tile, reinterpret_cast<const int8_t*>(a) + 32 * r);
            store(c + PANEL_COLS * r, factors.add(load(c + PANEL_COLS * r), sum, a, terms, r, R));
        }
    }
}

}  // namespace
}  // namespace octavo
