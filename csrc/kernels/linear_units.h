// Consecutive units of weights, packed or unpacked, as the vector int8 products read them. Each instruction set
// adds access to their codes and half scales (PackedSource, TileSource) and the product with R rows
// (multiply_units).
#pragma once

#include "linear_blocks.h"
#include "linear_streams.h"

namespace octavo {
namespace {

template <typename F>
struct PackedSource;
template <typename Form>
struct TileSource;
template <typename Form>
struct ShuffledTileSource;
template <typename Form>
struct UnitTile;

// Bytes [at, end) to prefetch into the L2 cache while units are multiplied, `step` bytes with each unit. All at once
// would fill the queue of outstanding misses, and the products would wait.
struct FetchAhead {
    const uint8_t *at, *end;
    int64_t step;  // a multiple of a cache line
    void fetch() {
        const uint8_t* const stop = end - at < step ? end : at + step;
        for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// The operands and sums for the products of two panels of one weight.
template <typename Form>
struct TilePair {
    const UnitTile<Form>* of[2];
    float* sums[2];
    FetchAhead ahead[2];
};

// c [R][16] += a * weights over `units` units. Inlined, because a source that is passed as an argument is copied
// through memory, and the loads of the next panel would wait for the copy.
template <int R, typename Source>
inline __attribute__((always_inline)) void multiply_units(Source source, int units, const uint8_t* a,
                                                          const int32_t* terms, float* c);

template <typename Form_>
struct TileUnits {
    using Form = Form_;
    const UnitTile<Form>* tile;
    F32x16 scales() const { return load(tile->scales); }
    F32x16 mins(int half) const { return load(tile->mins[half]); }
    // The factors of the super-block in which this is unit `unit`.
    const BlockFactors<Form>& block(int unit) const { return tile[-unit].block; }
    const int16_t* all_scales(int16_t*) const { return tile->block.scales; }
    void prefetch() const {}
    void next() { ++tile; }
};

// s and m of a unit.
template <typename Form>
struct UnitFactors {
    F32x16 scales, mins[2];

    template <typename Source>
    explicit UnitFactors(const Source& source) {
        if constexpr (!Form::scales_columns) scales = source.scales();
        for (int j = 0; j < Form::mins; ++j) mins[j] = source.mins(j);
    }
    // y after the unit, where I = sum. a: the unit in an image with r rows.
    F32x16 add(F32x16 y, F32x16 sum, const uint8_t* a, const int32_t* terms, int row, int r) const {
        const float* const row_scales = reinterpret_cast<const float*>(a + 32 * r);
        if constexpr (Form::scales_columns) return fma(sum, broadcast(row_scales[row]), y);
        y = fma(sum, scales * broadcast(row_scales[row]), y);
        if constexpr (Form::mins == 1) y = fma(mins[0], broadcast(row_scales[r + row]), y);
        if constexpr (Form::mins == 2)
            for (int j = 0; j < 2; ++j)
                y = fma(mins[j], broadcast(reinterpret_cast<const float*>(terms)[j * r + row]), y);
        return y;
    }
};

// Up to this many rows read the packed panel directly. Each number of rows has a separate loop for each type, which
// dominates compile time. Types that rarely serve several users therefore have fewer loops.
template <typename F>
constexpr int packed_rows() {
    constexpr bool is_rare = F::bits < 4 || (F::bits == 5 && F::units == 1) || F::has_e4m3_scales;
    return is_rare && PACKED_ROWS > 2 ? 2 : PACKED_ROWS;
}

// Whether the first group of many rows, a full one, reads the packed panel and leaves its units in tiles for the
// following groups. Unpacking uses parts of the core that products leave idle.
template <typename F>
constexpr bool keeps_group() {
    return KEEPS_GROUPS && packed_rows<F>() >= ROW_GROUP;
}

// c [ROW_GROUP][16] += a * units [first, first + units) of the panel, which stay in `tiles`.
template <typename F>
void multiply_group(const Panel& panel, int first, int units, const uint8_t* a, const int32_t* terms, float* c,
                    UnitTile<FormOf<F>>* tiles, FetchAhead ahead);

// pair.sums [ROW_GROUP][16] += a * pair.of
template <typename Form>
void multiply_tile_pair(TilePair<Form> pair, int units, const uint8_t* a, const int32_t* terms);

// c [rows][16] += a * panel
template <typename F>
void multiply_packed(const Panel& panel, int units, ImageGroup a, const int32_t* terms, float* c) {
    constexpr int MOST = packed_rows<F>() < ROW_GROUP ? packed_rows<F>() : ROW_GROUP;
    const PackedSource<F> source(panel, 0, units);
    unroll<MOST>([&](auto i) __attribute__((always_inline)) {
        constexpr int R = decltype(i)::value + 1;
        if (a.rows == R) multiply_units<R>(source, units, a.data, terms, c);
    });
}

template <bool IsFloat>
struct HalfScaleType {
    using type = int32_t;
};
template <>
struct HalfScaleType<true> {
    using type = float;
};
template <typename Form>
using HalfScale = typename HalfScaleType<Form::has_float_scales>::type;

// For a tile whose codes are magnitudes: 255 where a code is negative, and the sums of those magnitudes. There is one
// sum per half unit if half units have float scales, else only the first, for the whole unit.
template <bool IsApart>
struct TileSigns {};
template <>
struct alignas(64) TileSigns<true> {
    TileCode minus[PANEL_COLS * UNIT_K];
    int32_t starts[2][PANEL_COLS];
};

// One unpacked unit, reused for many rows.
template <typename Form>
struct alignas(64) UnitTile : TileSigns<Form::is_wide && SIGNS_APART> {
    TileCode codes[PANEL_COLS * UNIT_K];
    float scales[PANEL_COLS];
    float mins[Form::mins ? Form::mins : 1][PANEL_COLS];
    HalfScale<Form> half_scales[Form::has_half_scales ? 2 : 1][PANEL_COLS];
};

// If a super-block is summed in integers, its first unit has its factors.
template <int Bits, bool InHalves, int Mins>
struct alignas(64) UnitTile<BlockForm<Bits, InHalves, Mins>> {
    TileCode codes[PANEL_COLS * UNIT_K];
    BlockFactors<BlockForm<Bits, InHalves, Mins>> block;
};

inline float as_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The end of a super-block: y after it, where whole and mins are its integer sums and scale is S.
template <typename Form>
struct BlockEnd {
    F32x16 sum_factors, min_factors;
    F32x16 add(F32x16 y, F32x16 whole, F32x16 mins, float scale) const {
        F32x16 t = whole * sum_factors;
        if constexpr (Form::mins > 0) t = fma(mins, min_factors, t);
        return fma(t, broadcast(scale), y);
    }
};
template <typename Form>
inline BlockEnd<Form> block_end(const BlockFactors<Form>& factors) {
    return {load(factors.sum_factors), load(factors.min_factors)};
}
template <typename F>
inline BlockEnd<FormOf<F>> packed_end(const UnitCursor<F>& cursor) {
    const PackedBlock<F> block{cursor};
    return {block.sum_factors(), block.min_factors()};
}

// A separate function for each number of rows: in a shared one, registers are allocated less well.
template <int R, typename Source>
__attribute__((noinline)) void multiply_tile_units(const UnitTile<typename Source::Form>* tiles, int units,
                                                   const uint8_t* a, const int32_t* terms, float* c) {
    multiply_units<R>(Source{tiles}, units, a, terms, c);
}

// c [rows][16] += a * tiles
template <typename Form>
void multiply_tiles(const UnitTile<Form>* tiles, int units, ImageGroup a, const int32_t* terms, float* c) {
#if defined(OCTAVO_ISA_avx512vnni)
    if (a.rows == ROW_GROUP && starts_products_like_loads())
        return multiply_tile_units<ROW_GROUP, ShuffledTileSource<Form>>(tiles, units, a.data, terms, c);
#endif
    unroll<ROW_GROUP>([&](auto i) __attribute__((always_inline)) {
        constexpr int R = decltype(i)::value + 1;
        if (a.rows == R) multiply_tile_units<R, TileSource<Form>>(tiles, units, a.data, terms, c);
    });
}

// Rows whose activations stay in the L2 cache, and rows times panels whose sums a worker keeps.
constexpr int BLOCK_ROWS = 128, KEPT_ROWS = UNIT_PANELS * BLOCK_ROWS;
constexpr int WRITTEN_ROWS = BLOCK_ROWS;  // one panel after the other, the order in which their rows were prefetched
// Units unpacked at once, so that they stay in the L1 cache. Fewer for few groups of rows, because weights then stream
// through that cache from memory at the same time.
constexpr int TILE_UNITS = KEEPS_GROUPS ? 24 : 16, FEW_TILE_UNITS = 16, FEW_GROUPS = 4;

// Unpacked units of any format.
template <int I = 0>
constexpr int64_t tile_bytes() {
    if constexpr (I == NUM_WEIGHT_TYPES) {
        return 0;
    } else {
        constexpr int64_t size = align64(sizeof(UnitTile<FormOf<FormatOf<I>>>)) * TILE_UNITS,
                          rest = tile_bytes<I + 1>();
        return size > rest ? size : rest;
    }
}
constexpr int64_t UNPACKED_BYTES = MOST_PANELS * tile_bytes();

// Bytes of activations converted for products with dense panels.
constexpr int64_t DENSE_BYTES = 0;

// The terms of a block of rows with k columns.
constexpr int MOST_TERMS = 4;  // per unit
constexpr int64_t terms_bytes(int64_t k) { return BLOCK_ROWS * (k / UNIT_K) * MOST_TERMS * 4; }

// The number of rows of memory for the sums of `rows` rows with a panel.
constexpr int32_t sum_rows(int32_t rows) { return rows; }

// Whether finished sums are scaled, and by what.
inline bool scales_sums(const PackedWeight& w) { return may_scale_columns(w.type->traits) && w.groups.k == w.k; }
inline F32x16 sum_factors(const PackedWeight& w, int32_t panel) {
    if (!scales_sums(w)) return broadcast(1.0f);
    const uint8_t* const header = w.data + panel * w.panel_bytes;
    return w.groups.scale_bytes == 4 ? load(reinterpret_cast<const float*>(header)) : load_halves(header);
}

// Panels multiplied at once if there are many rows.
inline int panels_at_once() {
#if defined(OCTAVO_ISA_avx512vnni)
    if (needs_many_chains()) return MOST_PANELS;
#endif
    return 1;
}

// How many panels' sums a worker keeps for a block of `rows` rows, a multiple of `once`.
inline int fitting_panels(int32_t rows, int once) { return (BLOCK_ROWS / rows + once - 1) / once * once; }

}  // namespace
}  // namespace octavo
