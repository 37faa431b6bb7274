// Products of quantized panels in plain C++: the readable form of linear_format.h.
#pragma once

#include "linear_image.h"

namespace octavo {
namespace {

// One unit unpacked: w - zero, [32][16].
template <typename Form>
struct UnitTile {
    F32x16 scales;
    F32x16 mins[2];
    int32_t half_scales[2][PANEL_COLS];
    int16_t values[UNIT_K][PANEL_COLS];
};

template <typename F>
void unpack_unit(const WeightType& type, const UnitCursor<F>& cursor, UnitTile<FormOf<F>>& tile) {
    tile.scales = cursor.scales();
    for (int j = 0; j < F::mins; ++j) tile.mins[j] = cursor.mins(j);
    for (int k = 0; k < UNIT_K; ++k)
        for (int n = 0; n < PANEL_COLS; ++n)
            tile.values[k][n] = static_cast<int16_t>(unit_code<F>(type.table, cursor.codes(), k, n) - type.zero);
    for (int j = 0; j < 2; ++j)
        for (int n = 0; n < PANEL_COLS; ++n) tile.half_scales[j][n] = half_scale<F>(cursor.header, cursor.unit, j, n);
}

template <typename Form>
void multiply_row(const UnitTile<Form>& tile, uint8_t* unit, const int32_t* terms, int row, int r, float* c) {
    const int8_t* const a = image_codes(unit) + 32 * row;
    int32_t total[PANEL_COLS] = {};
    for (int j = 0; j < 2; ++j) {
        int32_t sum[PANEL_COLS] = {};
        for (int k = 16 * j; k < 16 * j + 16; ++k)
            for (int n = 0; n < PANEL_COLS; ++n) sum[n] += tile.values[k][n] * a[k];
        for (int n = 0; n < PANEL_COLS; ++n) total[n] += tile.half_scales[j][n] * sum[n];
    }
    float product[PANEL_COLS];
    for (int n = 0; n < PANEL_COLS; ++n) product[n] = static_cast<float>(total[n]);
    F32x16 y = fma(load(product), tile.scales * broadcast(image_scales(unit, r)[row]), load(c));
    if constexpr (Form::mins == 1) y = fma(tile.mins[0], broadcast(image_sums(unit, r)[row]), y);
    if constexpr (Form::mins == 2)
        for (int j = 0; j < 2; ++j) {
            float sum;
            std::memcpy(&sum, terms + j * r + row, 4);
            y = fma(tile.mins[j], broadcast(sum), y);
        }
    store(c, y);
}

// c [rows][16] += a * tiles
template <typename Form>
void multiply_tiles(const UnitTile<Form>* tiles, int units, ImageGroup a, const int32_t* terms, float* c) {
    for (int u = 0; u < units; ++u)
        for (int row = 0; row < a.rows; ++row)
            multiply_row(tiles[u], a.unit(u), terms + u * Form::term_count * a.rows, row, a.rows, c + PANEL_COLS * row);
}

template <typename F>
void multiply_packed(const Panel&, int, ImageGroup, const int32_t*, float*) {}

}  // namespace
}  // namespace octavo
