// Products of quantized panels with AMX: 16 rows x 16 columns x one unit (32 k) an instruction; few rows with VNNI.
//
// All tiles have 16 rows of 64 bytes (load_tile_configuration in isa.cpp). A unit fills half of a tile of weights, the
// other half is zero, so that the second 32 bytes of a row of activations (those of the next row) count nothing.
#pragma once

#include "amx_tiles.h"
#include "linear_avx512.h"

namespace octavo {
namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = TILE_ROWS * 64;
constexpr int BATCH_UNITS = 4;  // units whose products are under way together

// One unit unpacked into one tile of weights, or one for each half unit.
template <typename Form>
struct alignas(64) UnitTile {
    static constexpr int TILES = Form::in_halves ? 2 : 1;
    uint8_t codes[TILES][TILE_BYTES];
    float scales[PANEL_COLS];
    float mins[Form::mins ? Form::mins : 1][PANEL_COLS];
    float half_scales[TILES][PANEL_COLS];
};

template <typename F>
void unpack_unit(const PackedSource<F>& source, UnitTile<FormOf<F>>& tile) {
    using Tile = UnitTile<FormOf<F>>;
    const __m512i zero = _mm512_setzero_si512();
    for (int j = 0; j < Tile::TILES; ++j)
        for (int row = 0; row < TILE_ROWS; ++row) _mm512_storeu_si512(tile.codes[j] + 64 * row, zero);
    unroll<QUADS>([&](auto q) __attribute__((always_inline)) {
        constexpr int Q = decltype(q)::value;
        _mm512_storeu_si512(tile.codes[Tile::TILES == 2 ? Q / 4 : 0] + 64 * Q, source.template quad<Q>());
    });
    store(tile.scales, source.scales());
    for (int j = 0; j < F::mins; ++j) store(tile.mins[j], source.mins(j));
    if constexpr (F::has_half_scales)
        for (int j = 0; j < 2; ++j) store(tile.half_scales[j], source.half_scales(j));
}

using TileSums = int32_t[TILE_ROWS][PANEL_COLS];

// The integer sums of up to BATCH_UNITS products, without zero points.
template <typename Form, int Batch>
inline void multiply_batch(const UnitTile<Form>* tiles, ImageGroup a,
                           TileSums (&sums)[BATCH_UNITS][UnitTile<Form>::TILES]) {
    unroll<Batch>([&](auto i) __attribute__((always_inline)) {
        constexpr int I = decltype(i)::value, A = 4 + I % 2, B = 6 + I % 2;
        tile_load<A>(a.unit(I), 32);
        unroll<UnitTile<Form>::TILES>([&](auto j) __attribute__((always_inline)) {
            constexpr int J = decltype(j)::value, C = (I * UnitTile<Form>::TILES + J) % 4;
            tile_zero<C>();
            tile_load<B>(tiles[I].codes[J], 64);
            tile_dot_signed_unsigned<C, A, B>();
            tile_store<C>(sums[I][J], 64);
        });
    });
}

template <typename Form>
inline F32x16 row_sum(const UnitTile<Form>& tile, const TileSums (&sums)[UnitTile<Form>::TILES], const int32_t* terms,
                      int row, int rows) {
    F32x16 part[2];
    for (int j = 0; j < UnitTile<Form>::TILES; ++j) {
        __m512i sum = _mm512_loadu_si512(sums[j][row]);
        if constexpr (Form::has_zero_terms) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(terms[j * rows + row]));
        part[j] = {_mm512_cvtepi32_ps(sum)};
    }
    if constexpr (!Form::in_halves) return part[0];
    return fma(part[1], load(tile.half_scales[UnitTile<Form>::TILES - 1]), part[0] * load(tile.half_scales[0]));
}

// c [rows][16] += products of one unit
template <typename Form>
inline void add_unit(const UnitTile<Form>& tile, const TileSums (&sums)[UnitTile<Form>::TILES], ImageGroup a,
                     const int32_t* terms, float* c) {
    const UnitFactors<Form> factors(TileUnits<Form>{&tile});
    for (int r = 0; r < a.rows; ++r, c += PANEL_COLS)
        store(c, factors.add(load(c), row_sum<Form>(tile, sums, terms, r, a.rows), a.data, terms, r, a.rows));
}

// c [rows][16] += a * tiles
template <typename Form>
void multiply_tiles(const UnitTile<Form>* tiles, int units, ImageGroup a, const int32_t* terms, float* c) {
    alignas(64) TileSums sums[BATCH_UNITS][UnitTile<Form>::TILES];
    for (int u = 0; u < units; u += BATCH_UNITS) {
        const int batch = units - u < BATCH_UNITS ? units - u : BATCH_UNITS;
        switch (batch) {
            case 1:
                multiply_batch<Form, 1>(tiles + u, a.from(u), sums);
                break;
            case 2:
                multiply_batch<Form, 2>(tiles + u, a.from(u), sums);
                break;
            case 3:
                multiply_batch<Form, 3>(tiles + u, a.from(u), sums);
                break;
            default:
                multiply_batch<Form, 4>(tiles + u, a.from(u), sums);
        }
        for (int i = 0; i < batch; ++i)
            add_unit<Form>(tiles[u + i], sums[i], a.from(u + i), terms + (u + i) * Form::term_count * a.rows, c);
    }
}

}  // namespace
}  // namespace octavo
