// Products of panels of bfloat16 and float16 with AMX, as accurate as with float32.
//
// A float is split into two bfloat16: hi, the nearest to it, and lo, the nearest to the rest. The error is 2^-17 of it.
// A unit of 32 k adds three tile products (linear_amx.h) in this order: lo of the activations times hi of the weights,
// hi times hi, and hi times lo of the weights, unless the weights are bfloat16 themselves. Columns beyond the last k
// are zero.
#pragma once

#include "amx_tiles.h"
#include "linear_amx.h"
#include "linear_dense.h"

namespace octavo {
namespace {

constexpr int DENSE_PIECE = 8;                             // units of weights unpacked at once
constexpr int DENSE_ROW_UNITS = BLOCK_ROWS * DENSE_PIECE;  // rows times units of activations converted at once
constexpr int PARTS = 2;                                   // hi, lo
constexpr int64_t DENSE_BYTES = int64_t{DENSE_ROW_UNITS} * PARTS * ROW_UNIT_BYTES + ROW_GROUP * ROW_UNIT_BYTES;
constexpr int64_t LO_TILES = 2 * DENSE_PIECE * TILE_BYTES;  // from the tiles of hi to the tiles of lo, for two panels
static_assert(2 * LO_TILES <= UNPACKED_BYTES, "the tiles of two panels fit");

// Pairs of bfloat16: the nearest to two vectors, and the nearest to the remainders.
struct SplitPairs {
    __m512i hi, lo;
};
inline SplitPairs split(__m512 low, __m512 high) {
    const __m512i hi = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512 low_hi = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(hi)), 16));
    const __m512 high_hi =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(hi, 1)), 16));
    return {hi, (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(high, high_hi), _mm512_sub_ps(low, low_hi))};
}

// A mask for the first `count` of 16 numbers, or all of them if there are more.
inline __mmask16 first_lanes(int count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Activations of some units as tiles: [group][unit][part][row][32].
struct DenseImage {
    uint8_t* data;
    int units;

    const uint8_t* tile(int group, int unit, int part) const {
        return data + ((static_cast<int64_t>(group) * units + unit) * PARTS + part) * TILE_BYTES;
    }
    // k: columns of x from the first unit on.
    void convert(const DenseRows& x, int64_t k) const {
        for (int r = 0; r < x.rows; ++r) {
            uint8_t* out = data + static_cast<int64_t>(r / ROW_GROUP) * units * PARTS * TILE_BYTES +
                           r % ROW_GROUP * ROW_UNIT_BYTES;
            for (int u = 0; u < units; ++u, out += PARTS * TILE_BYTES) {
                const float* const from = x.data + r * x.stride + u * UNIT_K;
                const int left = k - u * UNIT_K < UNIT_K ? static_cast<int>(k - u * UNIT_K) : UNIT_K;
                const SplitPairs pairs = split(_mm512_maskz_loadu_ps(first_lanes(left), from),
                                               _mm512_maskz_loadu_ps(first_lanes(left - 16), from + 16));
                _mm512_storeu_si512(out, pairs.hi);
                _mm512_storeu_si512(out + TILE_BYTES, pairs.lo);
            }
        }
    }
};

// Interleaves two vectors of 16 16-bit numbers into pairs.
inline __m512i side_by_side(__m512i x) {
    alignas(64) static constexpr uint16_t PLACES[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(PLACES), x);
}

// Unpacks units of a panel into tiles of hi and, for float16, tiles of lo that are LO_TILES further on. k: as above.
template <typename F>
inline void unpack_dense(const uint8_t* panel, int units, int64_t k, uint8_t* tiles) {
    for (int64_t left = k; left > k - units * UNIT_K; left -= UNIT_K)
        for (int row = 0; row < 16; ++row, panel += 4 * PANEL_COLS, tiles += 64) {  // numbers for two k
            const int lanes = static_cast<int>(left - 2 * row) * 8;
            const __m512i x = left >= UNIT_K ? load_bytes(panel) : _mm512_maskz_loadu_epi32(first_lanes(lanes), panel);
            if constexpr (F::codes == Codes::bf16) {
                _mm512_storeu_si512(tiles, side_by_side(x));
            } else {
                const SplitPairs pairs =
                    split(_mm512_cvtph_ps(_mm512_castsi512_si256(x)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
                _mm512_storeu_si512(tiles, side_by_side(pairs.hi));
                _mm512_storeu_si512(tiles + LO_TILES, side_by_side(pairs.lo));
            }
        }
}

// Adds the products with P panels, whose tiles are DENSE_PIECE units apart, for the units of the image from `first` on.
// has_lo: whether the weights have lo, too.
template <int P, bool has_lo>
inline void multiply_dense_units(const DenseImage& image, int group, int first, const TilePanels<P>& panels) {
    for (int u = 0; u < panels.count; ++u) {
        const uint8_t* const tile = panels.tiles + u * TILE_BYTES;
        tile_load<6>(tile, 64);
        if constexpr (P == 2) tile_load<7>(tile + DENSE_PIECE * TILE_BYTES, 64);
        for (int part = PARTS - 1; part >= 0; --part) {
            tile_load_once<4>(image.tile(group, first + u, part), ROW_UNIT_BYTES);
            tile_dot_bf16<0, 4, 6>();
            if constexpr (P == 2) tile_dot_bf16<1, 4, 7>();
            if (has_lo && part == 0) {
                tile_load<6>(tile + LO_TILES, 64);
                tile_dot_bf16<0, 4, 6>();
                if constexpr (P == 2) {
                    tile_load<7>(tile + LO_TILES + DENSE_PIECE * TILE_BYTES, 64);
                    tile_dot_bf16<1, 4, 7>();
                }
            }
            tiles_unused<4>();
        }
        tiles_unused<6, 7>();
    }
}

template <int P, bool has_lo>
__attribute__((noinline)) void multiply_dense_tiles(const DenseImage& image, int groups, int first,
                                                    const TilePanels<P>& panels, bool from_zero) {
    for (int g = 0; g < groups; ++g) {
        each_sum<P>(panels, g, [&](auto p, float* c) { begin_sums<p.value>(c, from_zero); });
        multiply_dense_units<P, has_lo>(image, g, first, panels);
        each_sum<P>(panels, g, [](auto p, float* c) { tile_store<p.value>(c, 64); });
    }
}

}  // namespace
}  // namespace octavo
