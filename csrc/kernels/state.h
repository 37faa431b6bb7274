// The rows and the state of one sequence in a step, for kernels of operations with a StateCache.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

// 16 columns, or the remaining `lanes` of a row.
struct ColumnRange {
    int64_t first;
    int lanes;
    F32x16 read(const float* row) const { return lanes == 16 ? load(row + first) : load_partial(row + first, lanes); }
    void write(float* row, F32x16 v) const {
        if (lanes == 16)
            store(row + first, v);
        else
            store_partial(row + first, v, lanes);
    }
};

// Rows [begin, end) of one sequence. After some of them, its state is also saved to additional slots.
struct SequenceRows {
    int32_t begin, end;
    bool is_first;  // the sequence starts here, so its state is zero regardless of the slot
    float* state;
    const StateSlots* slots;
    const int32_t* saves;  // [num_saves, 2] (tokens, slot), ascending; slot -1: no save
    int32_t num_saves;

    // The first row after `t` before which the state is saved; `end` if there is none.
    int32_t border(int32_t t) const {
        for (int32_t i = 0; i < num_saves; ++i)
            if (saves[2 * i + 1] >= 0 && begin + saves[2 * i] > t) return begin + saves[2 * i];
        return end;
    }
    // The address for saving the state before row `t`, or null if it is not saved.
    float* saved(int32_t t) const {
        for (int32_t i = 0; i < num_saves; ++i)
            if (saves[2 * i + 1] >= 0 && begin + saves[2 * i] == t)
                return slots->data + saves[2 * i + 1] * slots->stride;
        return nullptr;
    }
};

inline SequenceRows sequence_rows(const StateSlots& slots, const Step& step, int32_t request) {
    SequenceRows rows{};
    rows.begin = step.query_start_loc[request];
    rows.end = step.query_start_loc[request + 1];
    rows.is_first = rows.begin < rows.end && step.positions[rows.begin] == 0;
    rows.state = slots.data + step.state_slots[request] * slots.stride;
    rows.slots = &slots;
    rows.saves = step.state_saves + 2 * int64_t{step.num_state_saves} * request;
    rows.num_saves = step.num_state_saves;
    return rows;
}

}  // namespace
}  // namespace octavo
