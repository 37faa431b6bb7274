// A fused product of some rows of activations with one or several packed weights:
//     [norm of x] -> products side by side, or kind(gate) * up -> + bias, scale, soft cap -> + residual
// Work is shared out as (block of rows, panel) pairs, in pieces that get smaller, to whoever is free.
#pragma once

#include "linear_operands.h"

namespace octavo {
namespace {

constexpr int LEAST_ROWS = 8;   // the smallest piece of work: so many rows times panels
constexpr int RUN_PANELS = 16;  // panels of one weight whose sums are kept until all are finished, if rows are few

struct RowBlock {
    int32_t first, count;  // first is a multiple of ROW_GROUP
};

// The terms of a block of an image depend on the type of the weight only: kept until one of them changes.
struct TermsKey {
    const WeightType* type = nullptr;
    int image = 0;
    int32_t first = -1;
};

// Neighbouring panels of one weight.
struct PanelRun {
    const PackedWeight& weight;
    Image image;  // of the activations, in the weight's order of columns
    int image_index;
    int32_t first;
    int count;
    int32_t head;

    const uint8_t* data(int i) const { return weight.data + (first + i) * weight.panel_bytes; }
};

// The first of `count` items whose cost begins at `at` or later.
inline int32_t first_item(int64_t at, int64_t cost, int32_t count) {
    if (at <= 0) return 0;
    const int64_t item = (at + cost - 1) / cost;
    return item < count ? static_cast<int32_t>(item) : count;
}

inline void prefetch_bytes(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

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

// Few rows: straight from the packed panel.
template <typename F>
void accumulate_packed(const Panel& panel, const PanelSums& s, [[maybe_unused]] UnitTile<FormOf<F>>* tiles) {
    const int32_t units = s.image.units;
#if defined(OCTAVO_ISA_avx2)  // where unpacking costs a quarter of a group's products: the first group leaves tiles
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

// Many rows: a piece of the panel is unpacked once for all of them. `next` is the panel after this one.
template <typename F>
void accumulate_unpacked(const Panel& panel, const uint8_t* next, const PanelSums& s, UnitTile<FormOf<F>>* tiles) {
    const BlockSizes<F> sizes(panel.groups);
    const int most = s.groups() <= FEW_GROUPS ? FEW_TILE_UNITS : TILE_UNITS;
    const int64_t piece_bytes = static_cast<int64_t>(most) * sizes.block_bytes / sizes.units;
    const int64_t slice = align64((piece_bytes + s.groups() - 1) / s.groups());
    for (int32_t u0 = 0, end; u0 < s.image.units; u0 = end) {
        const int units = s.image.units - u0 < most ? s.image.units - u0 : most;
        end = u0 + units;
        if constexpr (!keeps_group<F>()) {
            PackedSource<F> source(panel, u0, units);
            for (int u = 0; u < units; ++u, source.next()) unpack_unit<F>(source, tiles[u]);
        }
        // The next piece comes from memory while this one is multiplied, a slice with each group: all at once would
        // fill the queue of misses, and the products would wait.
        const int64_t into_block = F::is_grouped ? end % sizes.units * F::unit_bytes : 0;
        const uint8_t* ahead =
            end == s.image.units ? next : panel.data + end / sizes.units * sizes.block_bytes + into_block;
        for (int32_t g = 0; g < s.groups(); ++g, ahead += slice) {
            prefetch_bytes(ahead, slice);
            const ImageGroup a = s.group(g);
            const int32_t* const terms = s.terms_of<F>(g, u0, a.rows);
            if constexpr (keeps_group<F>()) {
                if (g == 0) {
                    multiply_group<F>(panel, u0, units, a.unit(u0), terms, s.sums_of(g), tiles);
                    continue;
                }
            }
            multiply_tiles(tiles, units, a.from(u0), terms, s.sums_of(g));
        }
    }
}

// One worker's part of a product.
class ProductRun {
  public:
    ProductRun(const Product& p, const ProductScratch& s, const Activations& a) : p_(p), s_(s), a_(a) {}

    // The panels [begin, end) of one weight, or of gate and up, for a block of rows.
    void run_panels(RowBlock block, int32_t begin, int32_t end) {
        block_ = block;
        run_panels(0, begin, end, 0);
    }

    // The sums of a block of rows with neighbouring panels of one weight, [count][block.count][16].
    const float* sum_panels(RowBlock block, int32_t first, int count) {
        block_ = block;
        accumulate(panel_run(0, first, count), 0);
        return s_.sums[0];
    }

    // Items are (block of rows, panel); a worker takes those whose cost begins in its pieces.
    void run(Worker& worker) {
        const int32_t blocks = (p_.x.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        int64_t cost = 0, least = 0;
        for (int i = 0; i < num_columns(); ++i) {
            cost += num_panels(*p_.weights[i].packed) * panel_cost(i);
            least = panel_cost(i) > least ? panel_cost(i) : least;
        }
        if (p_.x.rows < LEAST_ROWS) least *= LEAST_ROWS / p_.x.rows;
        Range part;
        for (;;) {
            part.end = worker.take(cost * blocks, least, &part.begin);
            if (part.begin >= cost * blocks) return;
            run_range(part, cost, blocks);
        }
    }

  private:
    bool gated() const { return p_.gate_kind != KIND_NONE; }
    int32_t num_columns() const { return gated() ? 1 : p_.num_weights; }

    // Few rows: bytes to read. Many rows: products, of which bytes take twice as many as smaller codes.
    int64_t panel_cost(int i) const {
        int64_t cost = 0;
        for (int j = i; j < (gated() ? p_.num_weights : i + 1); ++j) {
            const PackedWeight& w = *p_.weights[j].packed;
            if (p_.x.rows <= PACKED_ROWS)
                cost += w.panel_bytes / 64;
            else
                cost += w.type->traits.bits >= 8 ? 2 : 1;
        }
        return cost;
    }

    // cost: of all panels, for one block of rows.
    void run_range(Range range, int64_t cost, int32_t blocks) {
        for (int64_t b = range.begin / cost; b < blocks && b * cost < range.end; ++b) {
            const int32_t first = static_cast<int32_t>(b) * BLOCK_ROWS;
            block_ = {first, p_.x.rows - first < BLOCK_ROWS ? p_.x.rows - first : BLOCK_ROWS};
            run_block({range.begin - b * cost, range.end - b * cost});
        }
    }

    // The panels whose cost begins in [range.begin, range.end), counted from the first panel of the block.
    void run_block(Range range) {
        int64_t begin = 0;
        int32_t column = 0;
        for (int i = 0; i < num_columns(); ++i) {
            const PackedWeight& w = *p_.weights[i].packed;
            const int64_t cost = panel_cost(i);
            const int32_t panels = num_panels(w);
            run_panels(i, first_item(range.begin - begin, cost, panels), first_item(range.end - begin, cost, panels),
                       column);
            begin += cost * panels;
            column += w.n;
        }
    }

    // Sums of the i-th panel of a run.
    float* sums_of(int slot, int i) const { return s_.sums[slot] + i * block_.count * PANEL_COLS; }

    void run_panels(int i, int32_t begin, int32_t end, int32_t column) {
        const int fitting = BLOCK_ROWS / block_.count, step = fitting < RUN_PANELS ? fitting : RUN_PANELS;
        const int32_t head_panels = num_panels(*p_.weights[i].packed) / p_.heads;
        for (int32_t panel = begin, count; panel < end; panel += count) {
            count = end - panel < step ? end - panel : step;
            if (p_.heads > 1 && panel % head_panels + count > head_panels) count = head_panels - panel % head_panels;
            prefetch_output(column + panel * PANEL_COLS, count);
            accumulate(panel_run(i, panel, count), 0);
            if (gated()) accumulate(panel_run(1, panel, count), 1);
            for (int j = 0; j < count; ++j) {
                if (gated())
                    finish_gated(panel + j, j);
                else
                    finish(i, panel + j, column, sums_of(0, j));
            }
        }
    }

    PanelRun panel_run(int i, int32_t first, int count) const {
        int image;
        has_new_image(p_, i, image);
        const PackedWeight& w = *p_.weights[i].packed;
        const int32_t head = p_.heads > 1 ? first / (num_panels(w) / p_.heads) : 0;
        return {w, a_.image(image + head), image + head, first, count, head};
    }

    // Many rows lie far apart: by the time they are written their cache lines are here.
    void prefetch_output(int32_t column, int panels) const {
        if (block_.count <= FEW_ROWS) return;
        for (int32_t r = 0; r < block_.count; ++r)
            for (int i = 0; i < panels; ++i)
                __builtin_prefetch(
                    p_.out.data + static_cast<int64_t>(block_.first + r) * p_.out.cols + column + i * PANEL_COLS, 1, 2);
    }

    // The sums of `slot` become activations of the block * panels.
    void accumulate(const PanelRun& run, int slot) {
        for (int32_t r = 0; r < run.count * block_.count; ++r) store(s_.sums[slot] + r * PANEL_COLS, broadcast(0.0f));
        with_format(run.weight.type->traits, [&](auto format) {
            using F = decltype(format);
            if constexpr (F::is_dense)
                accumulate_dense<F>(run, slot);
            else
                accumulate_quantized<F>(run, slot);
        });
    }

    template <typename F>
    void accumulate_dense(const PanelRun& run, int slot) {
        const DenseRows rows = {a_.dense + block_.first * a_.stride + run.head * p_.k(), a_.stride, block_.count};
        for (int i = 0; i < run.count; ++i) multiply_dense_panel<F>(run.data(i), p_.k(), rows, sums_of(slot, i));
    }

    template <typename F>
    void accumulate_quantized(const PanelRun& run, int slot) {
        const WeightType& type = *run.weight.type;
        prepare_terms<FormOf<F>>(type, run, slot);
        for (int i = 0; i < run.count; ++i) {
            const Panel panel = {run.data(i), type, run.weight.groups};
            const PanelSums s = {run.image, block_, s_.terms[slot], sums_of(slot, i)};
            UnitTile<FormOf<F>>* const tiles = reinterpret_cast<UnitTile<FormOf<F>>*>(s_.tiles);
            if (block_.count <= packed_rows<F>())
                accumulate_packed<F>(panel, s, tiles);
            else
                accumulate_unpacked<F>(panel, run.data(i + 1), s, tiles);
        }
    }

    template <typename Form>
    void prepare_terms(const WeightType& type, const PanelRun& run, int slot) {
        const TermsKey& key = keys_[slot];
        if (key.type == &type && key.image == run.image_index && key.first == block_.first) return;
        const int zero = is_wide(type.traits) ? WIDE_ZERO : type.zero;
        int32_t* out = s_.terms[slot];
        for (int32_t g = 0; g * ROW_GROUP < block_.count; ++g)
            out = write_terms<Form>(run.image.group(block_.first / ROW_GROUP + g), run.image.units, zero, out);
        keys_[slot] = {&type, run.image_index, block_.first};
    }

    static int lanes_of(const PackedWeight& w, int32_t panel) {
        const int32_t left = w.n - panel * PANEL_COLS;
        return left < PANEL_COLS ? left : PANEL_COLS;
    }

    // Calls f(index of the row in the block, its sums + bias of weight i) and writes what it returns.
    template <typename F>
    void write_rows(int i, int32_t panel, int32_t column, const F& f) const {
        const int lanes = lanes_of(*p_.weights[i].packed, panel);
        const int64_t stride = p_.out.cols;
        const int64_t at = block_.first * stride + column + panel * PANEL_COLS;
        float* out = p_.out.data + at;
        const float* residual = p_.residual ? p_.residual + at : nullptr;
        for (int32_t r = 0; r < block_.count; ++r, out += stride) {
            F32x16 y = f(r);
            if (lanes == PANEL_COLS) {
                if (residual) y = y + load(residual + r * stride);
                store(out, y);
            } else {
                if (residual) y = y + load_partial(residual + r * stride, lanes);
                store_partial(out, y, lanes);
            }
        }
    }

    // Reads rows of sums with the bias of weight i.
    struct BiasedSums {
        const float* sums;
        F32x16 bias;
        bool biased;
        F32x16 operator()(int32_t r) const {
            const F32x16 y = load(sums + r * PANEL_COLS);
            return biased ? y + bias : y;
        }
    };
    BiasedSums biased_sums(int i, int32_t panel, const float* sums) const {
        const float* const bias = p_.biases ? p_.biases[i].data : nullptr;
        if (!bias) return {sums, broadcast(0.0f), false};
        return {sums, load_partial(bias + panel * PANEL_COLS, lanes_of(*p_.weights[i].packed, panel)), true};
    }

    void finish(int i, int32_t panel, int32_t column, const float* sums) const {
        const BiasedSums rows = biased_sums(i, panel, sums);
        if (p_.scale == 1.0f && p_.softcap == 0.0f) return write_rows(i, panel, column, rows);
        const F32x16 scale = broadcast(p_.scale), cap = broadcast(p_.softcap);
        if (p_.softcap == 0.0f) return write_rows(i, panel, column, [&](int32_t r) { return rows(r) * scale; });
        write_rows(i, panel, column, [&](int32_t r) { return cap * tanh(rows(r) * scale / cap); });
    }

    void finish_gated(int32_t panel, int i) const {
        const BiasedSums gate = biased_sums(0, panel, sums_of(0, i)), up = biased_sums(1, panel, sums_of(1, i));
        with_activation(p_.gate_kind, [&](auto activation) {
            if (p_.gate_limit == 0.0f && p_.up_offset == 0.0f)
                return write_rows(0, panel, 0, [&](int32_t r) { return activation(gate(r)) * up(r); });
            const F32x16 limit = broadcast(p_.gate_limit == 0.0f ? __builtin_huge_valf() : p_.gate_limit);
            const F32x16 offset = broadcast(p_.up_offset), least = broadcast(0.0f) - limit;
            write_rows(0, panel, 0, [&](int32_t r) {
                return activation(min(limit, gate(r))) * (max(least, min(limit, up(r))) + offset);
            });
        });
    }

    const Product& p_;
    const ProductScratch& s_;
    const Activations& a_;
    RowBlock block_{};
    TermsKey keys_[2];
};

inline void run_product(const Product& p, void* shared, Worker& worker) {
    if (p.x.rows == 0) return;
    const ProductScratch scratch(p, worker.scratch);
    const Activations a = prepare(p, scratch, shared, worker);
    ProductRun(p, scratch, a).run(worker);
}

// `p` with the largest number of rows.
inline ScratchSizes product_scratch(const Product& p) {
    const int64_t rows = p.x.rows;
    return {static_cast<size_t>(ProductScratch::bytes(p)),
            static_cast<size_t>(rows > FEW_ROWS ? ProductNeeds(p).bytes(p, rows) : 0)};
}

}  // namespace
}  // namespace octavo
