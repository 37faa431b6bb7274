// Sums of products with panels on AMX, with the arithmetic of linear_amx.h, or of linear_dense_amx.h for floats.
#pragma once

#include "linear_operands.h"

namespace octavo {
namespace {

// One worker's sums.
class ProductSums {
  public:
    explicit ProductSums(const ProductScratch& s) : tiles_(s.tiles), dense_(s.dense) {}

    // to.sums [run.count][sum_rows(block.count)][16] = activations of the block * panels.
    template <typename F>
    void multiply(const PanelRun& run, RowBlock block, const SumsPlace& to) {
        const int32_t rest = block.count - ROW_GROUP;
        configure(block.count > PACKED_ROWS ? TileRowCounts{ROW_GROUP, ROW_GROUP}
                  : rest > 0                ? TileRowCounts{ROW_GROUP, rest}
                                            : TileRowCounts{block.count, block.count});
        if (block.count <= ROW_GROUP)
            multiply_few<F, 1>(run, block, to.sums);
        else if (block.count <= PACKED_ROWS)
            multiply_few<F, 2>(run, block, to.sums);
        else
            multiply_many<F>(run, block, to.sums);
    }

    // As above, for panels of floats. rows: the activations of the block, k columns.
    template <typename F>
    void multiply_dense(const PanelRun& run, const DenseRows& rows, int k, float* sums) {
        if constexpr (F::codes != Codes::f32)
            if (F::codes == Codes::bf16 || rows.of_encoder) return multiply_dense_on_tiles<F>(run, rows, k, sums);
        zero_sums(sums, static_cast<int64_t>(run.count) * sum_rows(rows.rows));
        for (int i = 0; i < run.count; ++i)
            multiply_dense_panel<F>(run.data(i), k, rows, sums + i * sum_rows(rows.rows) * int64_t{PANEL_COLS});
    }

  private:
    template <typename F>
    void multiply_dense_on_tiles(const PanelRun& run, const DenseRows& rows, int k, float* sums) {
        const int64_t stride = sum_rows(rows.rows) * PANEL_COLS;
        const int groups = sum_rows(rows.rows) / ROW_GROUP, units = (k + UNIT_K - 1) / UNIT_K;
        const int count = groups == 1 ? rows.rows : ROW_GROUP;
        if (groups > 1 || rows_.first < count || rows_.second < count) configure({count, count});
        for (int first = 0, most = DENSE_ROW_UNITS / sum_rows(rows.rows); first < units; first += most) {
            const DenseImage image = {dense_, units - first < most ? units - first : most};
            const int64_t left = k - static_cast<int64_t>(first) * UNIT_K;
            image.convert({rows.data + first * UNIT_K, rows.stride, rows.rows}, left);
            for (int i = 0; i < run.count; i += 2) {
                float* const at = sums + i * stride;
                if (i + 2 <= run.count)
                    multiply_dense_panels<F, 2>(run, i, image, groups, first, left, {at, at + stride});
                else
                    multiply_dense_panels<F, 1>(run, i, image, groups, first, left, {at});
            }
        }
    }

    // Multiplies P panels from the i-th on by an image of the units from `first` on. `left`: columns that remain.
    template <typename F, int P>
    void multiply_dense_panels(const PanelRun& run, int i, const DenseImage& image, int groups, int first, int64_t left,
                               float* const (&sums)[P]) {
        constexpr int UNIT_BYTES = UNIT_K * PANEL_COLS * F::bits / 8;
        for (int u = 0; u < image.units; u += DENSE_PIECE) {
            TilePanels<P> panels = {tiles_, image.units - u < DENSE_PIECE ? image.units - u : DENSE_PIECE, {}};
            for (int p = 0; p < P; ++p) {
                panels.sums[p] = sums[p];
                const uint8_t* const numbers = run.data(i + p) + static_cast<int64_t>(first + u) * UNIT_BYTES;
                uint8_t* const tiles = tiles_ + p * DENSE_PIECE * TILE_BYTES;
                unpack_dense<F>(numbers, panels.count, left - u * UNIT_K, tiles);
            }
            multiply_dense_tiles<P, F::codes != Codes::bf16>(image, groups, u, panels, first + u == 0);
        }
    }

    void configure(TileRowCounts rows) {
        if (!(rows == rows_)) configure_tiles(rows);
        rows_ = rows;
    }
    static Panel panel(const PanelRun& run, int i) { return {run.data(i), *run.weight.type, run.weight.groups}; }
    static const int8_t* ranges(const PanelRun& run, int i) {
        return run.weight.ranges + static_cast<int64_t>(run.first + i) * PANEL_COLS;
    }
    static float* sums_of(float* sums, RowBlock block, int i) {
        return sums + static_cast<int64_t>(i) * sum_rows(block.count) * PANEL_COLS;
    }
    template <int G>
    static TileRows<G> first_rows(const PanelRun& run, RowBlock block, int first_unit) {
        const int32_t g = block.first / ROW_GROUP;
        if constexpr (G == 1)
            return {{run.image.group(g)}, first_unit};
        else
            return {{run.image.group(g), run.image.group(g + 1)}, first_unit};
    }

    template <typename F, int G>
    void multiply_few(const PanelRun& run, RowBlock block, float* sums) {
        const TileRows<G> rows = first_rows<G>(run, block, 0);
        for (int i = 0; i < run.count; ++i)
            multiply_unpacking<F, G>(panel(run, i), ranges(run, i), run.image.units, rows, tiles_, RING_UNITS - 1,
                                     PREFETCH_BYTES, sums_of(sums, block, i));
    }

    // Processes pieces of units in turn, so that their activations stay in the L2 cache for all panels of the run.
    template <typename F>
    void multiply_many(const PanelRun& run, RowBlock block, float* sums) {
        const int units = run.image.units, pieces = (units + PIECE_UNITS - 1) / PIECE_UNITS;
        for (int piece = 0; piece < pieces; ++piece) {
            const int first = units * piece / pieces, count = units * (piece + 1) / pieces - first;
            for (int i = 0; i < run.count; i += 2) {
                if (i + 2 <= run.count)
                    multiply_piece<F, 2>(run, block, i, first, count, sums);
                else
                    multiply_piece<F, 1>(run, block, i, first, count, sums);
            }
        }
    }

    template <typename F, int P>
    void multiply_piece(const PanelRun& run, RowBlock block, int i, int first, int count, float* sums) {
        const int32_t base = block.first / ROW_GROUP, groups = sum_rows(block.count) / ROW_GROUP;
        TilePanels<P> panels = {tiles_, count, {}};
        for (int p = 0; p < P; ++p) {
            panels.sums[p] = sums_of(sums, block, i + p);
            // Prefetches the same units of the following panels.
            multiply_unpacking<F, 2>(panel(run, i + p), ranges(run, i + p), count, first_rows<2>(run, block, first),
                                     tiles_ + p * PIECE_UNITS * TILE_BYTES, -1, P * run.weight.panel_bytes,
                                     panels.sums[p]);
        }
        multiply_tiles<P>(panels, run.image, base, first, 2, groups);
    }

    uint8_t *const tiles_, *const dense_;
    TileRowCounts rows_;  // current tile rows; 0: unknown
};

}  // namespace
}  // namespace octavo
