// Sums of products with panels on all levels except AMX, with the arithmetic of linear_format.h.
#pragma once

#include "linear_operands.h"

namespace octavo {
namespace {

// Sums of some rows with one panel, and the terms that the type needs for them.
struct PanelSums {
    const Image& image;
    RowBlock block;
    const int32_t* terms;
    float* sums;  // [block.count][16]

    int32_t groups() const { return (block.count + ROW_GROUP - 1) / ROW_GROUP; }
    ImageGroup group(int32_t g) const { return image.group(block.first / ROW_GROUP + g); }
    template <typename F>
    const int32_t* terms_of(int32_t g, int32_t unit, int rows) const {
        return terms + (static_cast<int64_t>(g) * ROW_GROUP * image.units + unit * rows) * FormOf<F>::term_count;
    }
    float* sums_of(int32_t g) const { return sums + g * ROW_GROUP * PANEL_COLS; }
};

// Few rows: multiplies directly from the packed panel.
template <typename F>
void accumulate_packed(const Panel& panel, const PanelSums& s, [[maybe_unused]] UnitTile<FormOf<F>>* tiles) {
    const int32_t units = s.image.units;
#if defined(OCTAVO_ISA_avx2)  // unpacking costs a quarter of a group's products, so the first group leaves tiles
    if constexpr (packed_rows<F>() > ROW_GROUP) {
        if (s.groups() == 2) {
            const ImageGroup a = s.group(0), b = s.group(1);
            PackedSource<F> source(panel, 0, units);
            for (int32_t u = 0; u < units; u += TILE_UNITS) {
                const int count = units - u < TILE_UNITS ? units - u : TILE_UNITS;
                multiply_keeping<F>(source, count, a.from(u), s.terms_of<F>(0, u, a.rows), s.sums_of(0), tiles);
                multiply_tiles(tiles, count, b.from(u), s.terms_of<F>(1, u, b.rows), s.sums_of(1));
            }
            return;
        }
    }
#endif
    for (int32_t g = 0; g < s.groups(); ++g) {
        const ImageGroup a = s.group(g);
        multiply_packed<F>(panel, units, a, s.terms_of<F>(g, 0, a.rows), s.sums_of(g));
    }
}

// One of the panels that are multiplied together. next: the start of the panel that replaces it afterwards.
template <typename F>
struct UnpackedPanel {
    Panel panel;
    const uint8_t* next;
    PanelSums sums;
    UnitTile<FormOf<F>>* tiles;
    const float* out;  // first output row, or null
    int64_t stride;    // between rows

    // Rows are far apart; prefetching has their cache lines ready by the time they are written.
    void prefetch_rows(int32_t g, int rows) const {
        for (int r = 0; out && r < rows; ++r) __builtin_prefetch(out + (g * ROW_GROUP + r) * stride, 1, 2);
    }
};

// Some panels, and their units [first, first + count), unpacked.
template <typename F, int P>
struct UnpackedPiece {
    const UnpackedPanel<F> (&panels)[P];
    int first, count;
    bool is_last;
    int64_t ahead, slice;  // offset of the next piece, and bytes of it to prefetch with each group of rows

    FetchAhead fetching(const UnpackedPanel<F>& p, int32_t g) const {
        const uint8_t* const at = (is_last ? p.next : p.panel.data + ahead) + g * slice;
        return {at, at + slice, align64((slice + count - 1) / count)};
    }
    void multiply(int32_t g) const {
        const PanelSums& s = panels[0].sums;
        const ImageGroup a = s.group(g);
        const int32_t* const terms = s.terms_of<F>(g, first, a.rows);
        if constexpr (keeps_group<F>()) {
            if (g == 0) {
                for (const UnpackedPanel<F>& p : panels)
                    multiply_group<F>(p.panel, first, count, a.unit(first), terms, p.sums.sums_of(g), p.tiles,
                                      fetching(p, g));
                return;
            }
        }
        if constexpr (P == 2) {
            if (a.rows == ROW_GROUP) {
                const UnpackedPanel<F>&p = panels[0], &q = panels[1];
                multiply_tile_pair<FormOf<F>>(
                    {{p.tiles, q.tiles}, {p.sums.sums_of(g), q.sums.sums_of(g)}, {fetching(p, g), fetching(q, g)}},
                    count, a.unit(first), terms);
                return;
            }
        }
        for (const UnpackedPanel<F>& p : panels) {
            FetchAhead all = fetching(p, g);
            all.step = slice;
            all.fetch();
            multiply_tiles(p.tiles, count, a.from(first), terms, p.sums.sums_of(g));
        }
    }
};

// Many rows: unpacks a piece of each panel once for all rows.
template <typename F, int P>
void accumulate_unpacked(const UnpackedPanel<F> (&panels)[P]) {
    const PanelSums& s = panels[0].sums;
    const BlockSizes<F> sizes(panels[0].panel.groups);
    const int most = P > 1 || s.groups() <= FEW_GROUPS ? FEW_TILE_UNITS : TILE_UNITS;
    const int64_t piece_bytes = static_cast<int64_t>(most) * sizes.block_bytes / sizes.units;
    const int64_t slice = align64((piece_bytes + s.groups() - 1) / s.groups());
    for (int32_t u0 = 0, end; u0 < s.image.units; u0 = end) {
        const int units = s.image.units - u0 < most ? s.image.units - u0 : most;
        end = u0 + units;
        if constexpr (!keeps_group<F>()) {
            for (const UnpackedPanel<F>& p : panels) {
                PackedSource<F> source(p.panel, u0, units);
                for (int u = 0; u < units; ++u, source.next()) unpack_unit<F>(source, p.tiles[u]);
            }
        }
        const int64_t into_block = F::is_grouped ? end % sizes.units * F::unit_bytes : 0;
        const bool is_last = end == s.image.units;
        const UnpackedPiece<F, P> piece = {
            panels, u0, units, is_last, end / sizes.units * static_cast<int64_t>(sizes.block_bytes) + into_block,
            slice};
        for (int32_t g = 0; g < s.groups(); ++g) {
            piece.multiply(g);
            if (is_last)
                for (const UnpackedPanel<F>& p : panels) p.prefetch_rows(g, s.group(g).rows);
        }
    }
}

// An image's terms for a block depend only on the type of the weight, and are kept until the block or the type changes.
struct TermsKey {
    const WeightType* type = nullptr;
    int image = 0;
    int32_t first = -1;
};

// One worker's sums.
class ProductSums {
  public:
    explicit ProductSums(const ProductScratch& s) : s_(s) {}

    // to.sums [run.count][block.count][16] = activations of the block * panels, divided by sum_factors.
    template <typename F>
    void multiply(const PanelRun& run, RowBlock block, const SumsPlace& to) {
        if constexpr (F::may_scale_columns)
            if (scales_sums(run.weight)) return multiply_panels<OfColumns<F>>(run, block, to);
        multiply_panels<F>(run, block, to);
    }

    // As above, for panels of floats. rows: the activations of the block, k columns.
    template <typename F>
    void multiply_dense(const PanelRun& run, const DenseRows& rows, int k, float* sums) {
        zero_sums(sums, static_cast<int64_t>(run.count) * rows.rows);
        for (int i = 0; i < run.count; ++i)
            multiply_dense_panel<F>(run.data(i), k, rows, sums + static_cast<int64_t>(i) * rows.rows * PANEL_COLS);
    }

  private:
    template <typename F>
    void multiply_panels(const PanelRun& run, RowBlock block, const SumsPlace& to) {
        const WeightType& type = *run.weight.type;
        prepare_terms<FormOf<F>>(type, run, block, to.slot);
        zero_sums(to.sums, static_cast<int64_t>(run.count) * block.count);
        UnitTile<FormOf<F>>* const tiles = reinterpret_cast<UnitTile<FormOf<F>>*>(s_.tiles);
        const auto panel = [&](int i) -> Panel { return {run.data(i), type, run.weight.groups}; };
        const auto sums = [&](int i) -> PanelSums {
            return {run.image, block, s_.terms[to.slot], to.sums + static_cast<int64_t>(i) * block.count * PANEL_COLS};
        };
        const auto unpacked = [&](int i, int next, int place) -> UnpackedPanel<F> {
            return {panel(i),
                    run.data(next),
                    sums(i),
                    tiles + place * TILE_UNITS,
                    to.out ? to.out + i * PANEL_COLS : nullptr,
                    to.out_stride};
        };
        int i = 0;
        if (block.count <= packed_rows<F>())
            for (; i < run.count; ++i) accumulate_packed<F>(panel(i), sums(i), tiles);
        if constexpr (MOST_PANELS == 2) {
            for (; panels_at_once() == 2 && i + 1 < run.count; i += 2)
                accumulate_unpacked<F, 2>({unpacked(i, i + 2, 0), unpacked(i + 1, i + 3, 1)});
        }
        for (; i < run.count; ++i) accumulate_unpacked<F, 1>({unpacked(i, i + 1, 0)});
    }

    template <typename Form>
    void prepare_terms(const WeightType& type, const PanelRun& run, RowBlock block, int slot) {
        static_assert(Form::term_count <= MOST_TERMS);
        const TermsKey& key = keys_[slot];
        if (key.type == &type && key.image == run.image_index && key.first == block.first) return;
        const int zero = is_wide(type.traits) ? WIDE_ZERO : type.zero;
        int32_t* out = s_.terms[slot];
        for (int32_t g = 0; g * ROW_GROUP < block.count; ++g)
            out = write_terms<Form>(run.image.group(block.first / ROW_GROUP + g), run.image.units, zero, out);
        keys_[slot] = {&type, run.image_index, block.first};
    }

    const ProductScratch& s_;
    TermsKey keys_[2];
};

}  // namespace
}  // namespace octavo
