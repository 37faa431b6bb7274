// A fused product of some rows of activations with one or several packed weights:
//     [norm of x] -> products side by side, or kind(gate) * up -> + bias, scale, soft cap -> + residual
// Work is divided into (block of rows, panel) pairs. Free workers take pieces that become smaller towards the end.
#pragma once

#include "linear_adapted.h"

namespace octavo {
namespace {

constexpr int LEAST_ROWS = 8;   // the smallest piece of work, in rows times panels
constexpr int RUN_PANELS = 16;  // panels of one weight whose sums are kept until all are finished, for few rows
static_assert(RUN_PANELS <= ADDED_PANELS, "adapters add to all of them at once");

// The first of `count` items whose cost begins at or after `at`.
inline int32_t first_item(int64_t at, int64_t cost, int32_t count) {
    if (at <= 0) return 0;
    const int64_t item = (at + cost - 1) / cost;
    return item < count ? static_cast<int32_t>(item) : count;
}

// One worker's share of a product.
class ProductRun {
  public:
    ProductRun(const Product& p, const ProductScratch& s, const Activations& a) : p_(p), s_(s), a_(a), sums_(s) {}

    // Computes the panels [begin, end) of one weight, or of gate and up, for a block of rows.
    void run_panels(RowBlock block, int32_t begin, int32_t end) {
        block_ = block;
        run_panels(0, begin, end, 0);
    }

    // The sums of a block of rows with consecutive panels of one weight, [count][sum_rows(block.count)][16].
    const float* sum_panels(RowBlock block, int32_t first, int count) {
        block_ = block;
        accumulate(panel_run(0, first, count), 0, nullptr);
        const PackedWeight& w = *p_.weights[0].packed;
        for (int i = 0; i < count && scales_sums(w); ++i) {
            const F32x16 factors = sum_factors(w, first + i);
            float* const sums = sums_of(0, i);
            for (int32_t r = 0; r < block.count * PANEL_COLS; r += PANEL_COLS)
                store(sums + r, load(sums + r) * factors);
        }
        if (p_.adapters) AddedProducts(p_, s_, a_, sums_).add(0, first, count, block, s_.sums[0], true);
        return s_.sums[0];
    }

    // Items are (block of rows, panel) pairs. A worker takes the items whose cost begins in its pieces.
    void run(Worker& worker) {
        const int32_t blocks = (p_.x.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        int64_t cost = 0, least = 0;
        for (int i = 0; i < num_columns(); ++i) {
            cost += num_panels(*p_.weights[i].packed) * panel_cost(i);
            least = panel_cost(i) > least ? panel_cost(i) : least;
        }
        least *= p_.x.rows < LEAST_ROWS ? LEAST_ROWS / p_.x.rows : panels_together();
        Range part;
        for (;;) {
            part.end = worker.take(cost * blocks, least, &part.begin);
            if (part.begin >= cost * blocks) return;
            run_range(part, cost, blocks);
        }
    }

  private:
    bool gated() const { return p_.gate_kind != KIND_NONE; }
    // The number of consecutive panels in one piece of work.
    int32_t panels_together() const {
        return p_.out.is_image ? UNIT_PANELS : p_.x.rows > PACKED_ROWS ? panels_at_once() : 1;
    }
    int32_t num_columns() const { return gated() ? 1 : p_.num_weights; }

    // With few rows: bytes to read. With many: products, which for byte codes take twice as long as for smaller codes.
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

    // cost: that of all panels, for one block of rows.
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
            const int32_t panels = num_panels(w), once = panels_together();
            const auto panel_at = [&](int64_t at) {
                const int32_t panel = once * first_item(at - begin, cost * once, (panels + once - 1) / once);
                return panel < panels ? panel : panels;
            };
            run_panels(i, panel_at(range.begin), panel_at(range.end), column);
            begin += cost * panels;
            column += w.n;
        }
    }

    // The sums of the i-th panel of a run.
    float* sums_of(int slot, int i) const { return s_.sums[slot] + i * sum_rows(block_.count) * PANEL_COLS; }

    void run_panels(int i, int32_t begin, int32_t end, int32_t column) {
        const int fitting = fitting_panels(block_.count, p_.out.is_image ? UNIT_PANELS : panels_at_once());
        const int step = fitting < RUN_PANELS ? fitting : RUN_PANELS;
        const int32_t head_panels = num_panels(*p_.weights[i].packed) / p_.heads;
        for (int32_t panel = begin, count; panel < end; panel += count) {
            count = end - panel < step ? end - panel : step;
            if (p_.heads > 1 && panel % head_panels + count > head_panels) count = head_panels - panel % head_panels;
            const float* const out = p_.out.data + static_cast<int64_t>(block_.first) * p_.out.cols + column +
                                     static_cast<int64_t>(panel) * PANEL_COLS;
            accumulate(panel_run(i, panel, count), 0, gated() ? nullptr : out);
            if (gated() && p_.num_weights > 1)
                accumulate(panel_run(1, panel, count), 1, p_.out.is_image ? nullptr : out);
            for (int j = 0; p_.adapters && j < (gated() ? p_.num_weights : 1); ++j)
                AddedProducts(p_, s_, a_, sums_).add(gated() ? j : i, panel, count, block_, s_.sums[j], false);
            for (int32_t r = 0; r < block_.count; r += WRITTEN_ROWS) {
                const RowBlock part = {r, block_.count - r < WRITTEN_ROWS ? block_.count - r : WRITTEN_ROWS};
                if (gated())
                    for (int j = 0; j < count; j += p_.out.is_image ? UNIT_PANELS : 1) finish_gated(panel + j, j, part);
                else
                    for (int j = 0; j < count; ++j) finish(i, panel + j, column, sums_of(0, j), part);
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

    // Sets the sums of `slot` to activations of the block * panels. out: where results will be written, or null.
    void accumulate(const PanelRun& run, int slot, const float* out) {
        with_format(run.weight.type->traits, [&](auto format) {
            using F = decltype(format);
            if constexpr (F::is_dense)
                sums_.template multiply_dense<F>(run, dense_rows(run.head), p_.k(), s_.sums[slot]);
            else
                sums_.template multiply<F>(run, block_, {s_.sums[slot], slot, out, p_.out.cols});
        });
    }

    DenseRows dense_rows(int32_t head) const {
        return {a_.dense + block_.first * a_.stride + head * p_.k(), a_.stride, block_.count,
                p_.x.domain >= FIRST_FURTHER_DOMAIN};
    }

    static int lanes_of(const PackedWeight& w, int32_t panel) {
        const int32_t left = w.n - panel * PANEL_COLS;
        return left < PANEL_COLS ? left : PANEL_COLS;
    }

    // Writes f(row index in the block) for some of its rows.
    template <typename F>
    void write_rows(int i, int32_t panel, int32_t column, RowBlock part, const F& f) const {
        const int lanes = lanes_of(*p_.weights[i].packed, panel);
        const int64_t stride = p_.out.cols;
        const int64_t at = block_.first * stride + column + panel * PANEL_COLS;
        float* out = p_.out.data + at + part.first * stride;
        const float* residual = p_.residual ? p_.residual + at : nullptr;
        for (int32_t r = part.first; r < part.first + part.count; ++r, out += stride) {
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

    // Reads rows of sums and adds the bias of weight i.
    struct BiasedSums {
        const float* sums;
        F32x16 factors, bias;
        bool biased;
        F32x16 operator()(int32_t r) const {
            const F32x16 y = load(sums + r * PANEL_COLS) * factors;
            return biased ? y + bias : y;
        }
    };
    BiasedSums biased_sums(int i, int32_t panel, const float* sums) const {
        const float* const bias = p_.biases ? p_.biases[i].data : nullptr;
        const F32x16 factors = sum_factors(*p_.weights[i].packed, panel);
        if (!bias) return {sums, factors, broadcast(0.0f), false};
        const int lanes = lanes_of(*p_.weights[i].packed, panel);
        const float* const from = bias + panel * PANEL_COLS;
        return {sums, factors, lanes == PANEL_COLS ? load(from) : load_partial(from, lanes), true};
    }

    void finish(int i, int32_t panel, int32_t column, const float* sums, RowBlock part) const {
        const BiasedSums rows = biased_sums(i, panel, sums);
        if (p_.scale == 1.0f && p_.softcap == 0.0f) return write_rows(i, panel, column, part, rows);
        const F32x16 scale = broadcast(p_.scale), cap = broadcast(p_.softcap);
        if (p_.softcap == 0.0f) return write_rows(i, panel, column, part, [&](int32_t r) { return rows(r) * scale; });
        write_rows(i, panel, column, part, [&](int32_t r) { return cap * tanh(rows(r) * scale / cap); });
    }

    struct GatedSums {
        BiasedSums gate, up;
    };
    GatedSums gated_sums(int32_t panel, int i) const {
        const int up = p_.num_weights - 1;  // a weight that is its own gate has both sums
        return {biased_sums(0, panel, sums_of(0, i)), biased_sums(up, panel, sums_of(up, i))};
    }

    // Finishes the i-th panel of a run; for an image, together with the next one.
    void finish_gated(int32_t panel, int i, RowBlock part) const {
        with_activation(p_.gate_kind, [&](auto activation) {
            if (p_.gate_limit == 0.0f && p_.up_offset == 0.0f)
                return write_gated(panel, i, part, [&](const GatedSums& sums, int32_t r) {
                    return activation(sums.gate(r)) * sums.up(r);
                });
            const float none = __builtin_huge_valf(), most = p_.gate_limit == 0.0f ? none : p_.gate_limit;
            const F32x16 limit = broadcast(most), before = broadcast(p_.limits_activated ? none : most),
                         after = broadcast(p_.limits_activated ? most : none);
            const F32x16 offset = broadcast(p_.up_offset), least = broadcast(0.0f) - limit;
            write_gated(panel, i, part, [&](const GatedSums& sums, int32_t r) {
                return min(after, activation(min(before, sums.gate(r)))) *
                       (max(least, min(limit, sums.up(r))) + offset);
            });
        });
    }
    template <typename F>
    void write_gated(int32_t panel, int i, RowBlock part, const F& f) const {
        const GatedSums sums = gated_sums(panel, i);
        if (!p_.out.is_image) return write_rows(0, panel, 0, part, [&](int32_t r) { return f(sums, r); });
        const GatedSums next = gated_sums(panel + 1, i + 1);
        const Image image = image_of(p_.out);
        for (int32_t r = part.first; r < part.first + part.count; ++r)
            image.write_unit(f(sums, r), f(next, r), block_.first + r, panel / UNIT_PANELS);
    }

    const Product& p_;
    const ProductScratch& s_;
    const Activations& a_;
    RowBlock block_{};
    ProductSums sums_;
};

inline void run_product(const Product& p, void* shared, Worker& worker) {
    if (p.x.rows == 0) return;
    const ProductScratch scratch(p, worker.scratch);
    const Activations a = prepare(p, scratch, shared, worker);
    if (p.adapters && p.adapters->has_any()) {
        ProductSums sums(scratch);
        InnerProducts(p, scratch, a, sums).run(worker);
        worker.barrier();
    }
    ProductRun(p, scratch, a).run(worker);
}

// `p` must have the largest number of rows.
inline ScratchSizes product_scratch(const Product& p) {
    const int64_t rows = p.x.rows;
    return {static_cast<size_t>(ProductScratch::bytes(p)),
            static_cast<size_t>(rows > FEW_ROWS ? ProductNeeds(p).bytes(p, rows) : 0)};
}

}  // namespace
}  // namespace octavo
