// What adapters add to a product's sums before bias, activation and residual: gain * sums + scale (x A^T) B^T.
//
// Both factors use the products for bfloat16 panels, so a row's sums do not depend on its neighbours.
#pragma once

#if defined(OCTAVO_ISA_amx)
#include "linear_bf16.h"
#else
#include "linear_int8.h"
#endif

namespace octavo {
namespace {

using FactorFormat = Format<Codes::bf16, 16, 1, Scales::none, Mins::none>;

// The panels of a factor in the form that a product reads.
inline PackedWeight factor_of(const uint16_t* numbers, int32_t k) {
    PackedWeight w{};
    w.k = k;
    w.panel_bytes = factor_panel_bytes(k);
    w.data = reinterpret_cast<const uint8_t*>(numbers);
    return w;
}

// Consecutive rows with the same adapter.
struct AlikeRows {
    int32_t first, count;
};

// One worker's share of the products with A.
class InnerProducts {
  public:
    InnerProducts(const Product& p, const ProductScratch& s, const Activations& a, ProductSums& sums)
        : r_(*p.adapters), s_(s), a_(a), sums_(sums) {}

    // unit: the number of the first work unit, which determines the worker that takes it.
    void run(const Worker& worker, int64_t unit = 0) {
        for (int32_t first = 0; first < r_.num_rows;) {
            const int32_t end = first + ADDED_ROWS / 2 < r_.num_rows ? first + ADDED_ROWS / 2 : r_.num_rows;
            const int32_t count = r_.alike(first, end), slot = r_.slot_of(first);
            for (int32_t piece = 0; slot >= 0 && piece < r_.pieces(); ++piece)
                for (int32_t head = 0; head < r_.heads; ++head)
                    for (int32_t weight = 0, next; weight < r_.count; weight = next) {
                        next = end_of_panels(slot, weight);
                        if (r_.part(slot, weight).a && unit++ % worker.count == worker.index)
                            multiply({first, count}, slot, piece, head, weight, next);
                    }
            first += count;
        }
    }

  private:
    // The end of the weights from `weight` on whose panels of A are contiguous, so that the rows are read once. With
    // few rows, each weight is a piece of work of its own.
    int32_t end_of_panels(int32_t slot, int32_t weight) const {
        int32_t end = weight + 1, panels = factor_panels(r_.part(slot, weight).rank);
        if (r_.num_rows <= FEW_ROWS || r_.heads > 1 || !r_.part(slot, weight).a) return end;
        for (; end < r_.count; ++end) {
            const LowRank &before = r_.part(slot, end - 1), &next = r_.part(slot, end);
            panels += factor_panels(next.rank);
            const int64_t size = static_cast<int64_t>(factor_panels(before.rank)) * PANEL_COLS * r_.k;
            if (next.a != before.a + size || panels > ADDED_PANELS) break;
        }
        return end;
    }

    void multiply(AlikeRows rows, int32_t slot, int32_t piece, int32_t head, int32_t weight, int32_t end) const {
        int32_t panels = 0;
        for (int32_t w = weight; w < end; ++w) panels += factor_panels(r_.part(slot, w).rank);
        const int32_t k0 = piece * INNER_K, count = r_.k - k0 < INNER_K ? r_.k - k0 : INNER_K;
        PackedWeight a = factor_of(r_.a_of(r_.part(slot, weight), head), r_.k);
        a.data += factor_panel_bytes(k0);
        const float* const x = a_.dense + rows.first * a_.stride + static_cast<int64_t>(head) * r_.k + k0;
        int32_t of = weight, column = 0;
        for (int32_t first = 0; first < panels; first += ADDED_PANELS) {
            const int some = panels - first < ADDED_PANELS ? panels - first : ADDED_PANELS;
            sums_.template multiply_dense<FactorFormat>({a, {}, 0, first, some, 0}, {x, a_.stride, rows.count}, count,
                                                        s_.added);
            for (int i = 0; i < some; ++i) {
                if (column == factor_panels(r_.part(slot, of).rank) * PANEL_COLS) ++of, column = 0;
                const float* const from = s_.added + static_cast<int64_t>(i) * sum_rows(rows.count) * PANEL_COLS;
                const F32x16 scale = broadcast(r_.part(slot, of).scale);
                for (int32_t q = 0; q < rows.count; ++q)
                    store(r_.inner_of(piece, rows.first + q, of, head) + column, load(from + q * PANEL_COLS) * scale);
                column += PANEL_COLS;
            }
        }
    }

    const AdapterRows& r_;
    const ProductScratch& s_;
    const Activations& a_;
    ProductSums& sums_;
};

// Adds the adapters' terms to the sums of a block of rows with consecutive panels of weight i.
class AddedProducts {
  public:
    AddedProducts(const Product& p, const ProductScratch& s, const Activations& a, ProductSums& sums)
        : p_(p), r_(*p.adapters), s_(s), a_(a), sums_(sums) {}

    // to: [count][sum_rows(block.count)][16]. are_scaled: whether the sums already include their factors.
    void add(int i, int32_t first, int count, RowBlock block, float* to, bool are_scaled) const {
        const int32_t end = block.first + block.count;
        for (int32_t row = block.first; row < end;) {
            const int32_t rows = r_.alike(row, row + ADDED_ROWS < end ? row + ADDED_ROWS : end);
            const int32_t slot = r_.slot_of(row);
            if (slot >= 0) {
                const LowRank& part = r_.part(slot, i);
                if (part.b) multiply({row, rows}, part, i, first, count);
                if (part.b || part.gain)
                    add_rows({row - block.first, rows}, part, i, first, count, sum_rows(block.count), to, are_scaled);
            }
            row += rows;
        }
    }

  private:
    void multiply(AlikeRows rows, const LowRank& part, int i, int32_t first, int count) const {
        const PackedWeight& w = *p_.weights[i].packed;
        const uint16_t* const numbers = part.b + r_.first_panel(w.n) * PANEL_COLS * part.rank;
        const PackedWeight b = factor_of(numbers, part.rank);
        const int32_t head = r_.heads > 1 ? first / (num_panels(w) / r_.heads) : 0;
        DenseRows x = {a_.dense + rows.first * a_.stride, a_.stride, rows.count};  // input for a full-rank weight
        if (part.a) x = {inner_rows(rows, i, head, part.rank), r_.width(), rows.count};
        sums_.template multiply_dense<FactorFormat>({b, {}, 0, first, count, 0}, x, part.rank, s_.added);
    }

    // Sums up the pieces.
    const float* inner_rows(AlikeRows rows, int32_t weight, int32_t head, int32_t rank) const {
        for (int32_t q = 0; q < rows.count; ++q)
            for (int32_t j = 0; j < rank; j += PANEL_COLS) {
                F32x16 sum = load(r_.inner_of(0, rows.first + q, weight, head) + j);
                for (int32_t piece = 1; piece < r_.pieces(); ++piece)
                    sum = sum + load(r_.inner_of(piece, rows.first + q, weight, head) + j);
                store(s_.inner_rows + q * r_.width() + j, sum);
            }
        return s_.inner_rows;
    }

    void add_rows(AlikeRows rows, const LowRank& part, int i, int32_t first, int count, int32_t sum_stride, float* to,
                  bool are_scaled) const {
        const PackedWeight& w = *p_.weights[i].packed;
        for (int j = 0; j < count; ++j) {
            const F32x16 one = broadcast(1.0f), scale = broadcast(part.a ? 1.0f : part.scale);
            // The factors are powers of two, so the division is exact.
            const F32x16 inverse = are_scaled ? scale : scale / sum_factors(w, first + j);
            const int64_t column = static_cast<int64_t>(first + j) * PANEL_COLS;
            const F32x16 gain = part.gain ? load(part.gain + r_.first_panel(w.n) * PANEL_COLS + column) : one;
            const float* const added = s_.added + static_cast<int64_t>(j) * sum_rows(rows.count) * PANEL_COLS;
            float* const at = to + (static_cast<int64_t>(j) * sum_stride + rows.first) * PANEL_COLS;
            for (int32_t q = 0; q < rows.count * PANEL_COLS; q += PANEL_COLS) {
                F32x16 y = load(at + q);
                if (part.gain) y = y * gain;
                store(at + q, part.b ? fma(load(added + q), inverse, y) : y);
            }
        }
    }

    const Product& p_;
    const AdapterRows& r_;
    const ProductScratch& s_;
    const Activations& a_;
    ProductSums& sums_;
};

}  // namespace
}  // namespace octavo
