// The adapters for the rows of a product, and the inner numbers: the product of the rows with A, which B reads.
#pragma once

#include "kernel.h"
#include "packed_weight.h"

namespace octavo {
namespace {

// Number of columns of x in one partial sum of an inner number. The split does not depend on the worker.
constexpr int32_t INNER_K = 2048;
static_assert(INNER_K % UNIT_K == 0, "whole units");

inline int32_t factor_panels(int32_t rank) { return (rank + PANEL_COLS - 1) / PANEL_COLS; }
// Bytes in one panel of a factor: 16 columns of k 16-bit numbers.
inline int64_t factor_panel_bytes(int64_t k) { return k * PANEL_COLS * 2; }

struct AdapterRows {
    const LowRank* parts;  // of the first weight in the first slot
    int32_t stride;        // parts per slot, one for each weight of the operation
    int32_t count;         // consecutive weights that read the rows together
    int32_t max_rank, heads, k;
    const float* slots;   // one per row; -1: no adapter
    const int32_t* rows;  // indices into `slots` for the product's rows; null: the same order
    int32_t num_rows;
    float* inner;        // [pieces][num_rows][count][heads][width]
    int32_t expert = 0;  // in a stack
    int32_t skip = 0;    // columns in the expert's first panel that belong to the previous expert

    int32_t width() const { return factor_panels(max_rank) * PANEL_COLS; }
    int32_t pieces() const { return (k + INNER_K - 1) / INNER_K; }
    int64_t row_width() const { return static_cast<int64_t>(count) * heads * width(); }
    // Inner numbers per row.
    int64_t row_numbers() const { return pieces() * row_width(); }
    int64_t inner_bytes() const { return num_rows * row_numbers() * static_cast<int64_t>(sizeof(float)); }
    int32_t slot_of(int32_t row) const { return static_cast<int32_t>(slots[rows ? rows[row] : row]); }
    const LowRank& part(int32_t slot, int32_t weight) const {
        return parts[static_cast<int64_t>(slot) * stride + weight];
    }
    // Counts the rows from `first`, up to `end`, that share an adapter.
    int32_t alike(int32_t first, int32_t end) const {
        const int32_t slot = slot_of(first);
        int32_t last = first + 1;
        while (last < end && slot_of(last) == slot) ++last;
        return last - first;
    }
    float* inner_of(int32_t piece, int32_t row, int32_t weight, int32_t head) const {
        return inner + (static_cast<int64_t>(piece) * num_rows + row) * row_width() +
               (static_cast<int64_t>(weight) * heads + head) * width();
    }
    // A part for a stack has the factors of all experts, one after the other.
    const uint16_t* a_of(const LowRank& part, int32_t head) const {
        return part.a + (static_cast<int64_t>(expert) * heads + head) * factor_panels(part.rank) * PANEL_COLS * k;
    }
    // The expert's first panel of B and of a gain for a weight with n rows, including the skipped columns.
    int64_t first_panel(int32_t n) const { return expert * stack_panels(n - skip); }
    bool has_any() const {
        for (int32_t r = 0; r < num_rows; ++r)
            if (slot_of(r) >= 0) return true;
        return false;
    }
};

}  // namespace
}  // namespace octavo
