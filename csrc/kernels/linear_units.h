// Units of weights one after the other, packed or unpacked, as the products with vectors read them. An instruction set
// adds their codes and half scales (PackedSource, TileSource) and the product of R rows (multiply_units).
#pragma once

#include "linear_grid.h"
#include "linear_image.h"

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

// c [R][16] += a * weights over `units` units. Inlined: a source that is an argument is copied through memory, and the
// loads of the next panel would wait for that.
template <int R, typename Source>
inline __attribute__((always_inline)) void multiply_units(Source source, int units, const uint8_t* a,
                                                          const int32_t* terms, float* c);

template <typename F>
struct StreamedUnits : UnitCursor<F> {
    using Form = FormOf<F>;
    using UnitCursor<F>::UnitCursor;
    void prefetch() const {
        const uint8_t* const ahead = this->codes() + PREFETCH_BYTES;
        constexpr int BYTES = F::is_grouped ? F::unit_bytes : F::block_bytes / (F::units > 0 ? F::units : 1);
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(ahead + i);
    }
};

template <typename F, bool IsGrid = F::is_grid && PACKED_ROWS != 0>
struct PackedUnits : StreamedUnits<F> {
    using StreamedUnits<F>::StreamedUnits;
};

#if defined(__AVX2__) || defined(OCTAVO_NEON)
// The vectors of the unit are looked up when the walk gets there. Their indices are kept from the unit before it, so
// that no lookup waits for them.
template <typename F>
struct PackedUnits<F, true> : StreamedUnits<F> {
    PackedUnits(const Panel& panel, int first, int count)
        : StreamedUnits<F>(panel, first, count), grid_(panel.type.table) {
        grid_indices<F>(this->codes(), indices_[0]);
        look_up_unit();
    }
    const uint8_t* vectors(int quad) const { return vectors_ + QUAD_BYTES * quad; }
    void next() {
        StreamedUnits<F>::next();
        current_ ^= 1;
        if (!this->is_done()) look_up_unit();
    }

  private:
    void look_up_unit() {
        if (const uint8_t* const codes = this->next_codes()) grid_indices<F>(codes, indices_[current_ ^ 1]);
        look_up<F>(grid_, this->codes(), indices_[current_], vectors_);
    }
    const int8_t* grid_;
    int current_ = 0;
    alignas(64) uint16_t indices_[2][INDICES];
    alignas(64) uint8_t vectors_[PANEL_COLS * UNIT_K];
};
#endif

template <typename Form_>
struct TileUnits {
    using Form = Form_;
    const UnitTile<Form>* tile;
    F32x16 scales() const { return load(tile->scales); }
    F32x16 mins(int half) const { return load(tile->mins[half]); }
    void prefetch() const {}
    void next() { ++tile; }
};

// s and m of a unit.
template <typename Form>
struct UnitFactors {
    F32x16 scales, mins[2];

    template <typename Source>
    explicit UnitFactors(const Source& source) : scales(source.scales()) {
        for (int j = 0; j < Form::mins; ++j) mins[j] = source.mins(j);
    }
    // y after the unit, with I = sum. a: the unit of an image with r rows.
    F32x16 add(F32x16 y, F32x16 sum, const uint8_t* a, const int32_t* terms, int row, int r) const {
        const float* const row_scales = reinterpret_cast<const float*>(a + 32 * r);
        y = fma(sum, scales * broadcast(row_scales[row]), y);
        if constexpr (Form::mins == 1) y = fma(mins[0], broadcast(row_scales[r + row]), y);
        if constexpr (Form::mins == 2)
            for (int j = 0; j < 2; ++j)
                y = fma(mins[j], broadcast(reinterpret_cast<const float*>(terms)[j * r + row]), y);
        return y;
    }
};

// Up to so many rows read the packed panel directly. Each number of rows is a loop of its own for each type, which most
// of the compiler's time goes into: types that are rarely served to several users have few of them.
template <typename F>
constexpr int packed_rows() {
    constexpr bool is_rare = F::bits < 4 || (F::bits == 5 && F::units == 1) || F::has_e4m3_scales;
    return is_rare && PACKED_ROWS > 2 ? 2 : PACKED_ROWS;
}

// Whether the first group of many rows, a whole one, reads the packed panel and leaves its units in tiles for the
// others: unpacking takes parts of the core that products leave idle.
template <typename F>
constexpr bool keeps_group() {
    return KEEPS_GROUPS && packed_rows<F>() >= ROW_GROUP;
}

// c [ROW_GROUP][16] += a * units [first, first + units) of the panel, which stay in `tiles`.
template <typename F>
void multiply_group(const Panel& panel, int first, int units, const uint8_t* a, const int32_t* terms, float* c,
                    UnitTile<FormOf<F>>* tiles);

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

#if !defined(OCTAVO_ISA_amx)

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

// Of a tile whose codes are magnitudes: 255 where a code is negative, and the sums of the magnitudes there, of the
// halves of a unit if these have float scales, else of the unit, the first.
template <bool IsApart>
struct TileSigns {};
template <>
struct alignas(64) TileSigns<true> {
    TileCode minus[PANEL_COLS * UNIT_K];
    int32_t starts[2][PANEL_COLS];
};

// One unit unpacked, reused for many rows.
template <typename Form>
struct alignas(64) UnitTile : TileSigns<Form::is_wide && SIGNS_APART> {
    TileCode codes[PANEL_COLS * UNIT_K];
    float scales[PANEL_COLS];
    float mins[Form::mins ? Form::mins : 1][PANEL_COLS];
    HalfScale<Form> half_scales[Form::has_half_scales ? 2 : 1][PANEL_COLS];
};

// A function of its own for each number of rows: in one for all of them the registers are shared out worse.
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

#endif

}  // namespace
}  // namespace octavo
