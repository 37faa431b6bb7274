// The rows and the state of one sequence in a step, for kernels of operations with a StateCache.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

// Sixteen columns, or the `lanes` that are left of a row.
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

// Rows [begin, end) of one sequence. After the rows before `border` its state is also written to `saved`, if that is
// not null; border is `end` otherwise.
struct SequenceRows {
    int32_t begin, border, end;
    bool is_first;  // the sequence starts here: its state is zero, whatever the slot holds
    float* state;
    float* saved;
};

inline SequenceRows sequence_rows(const StateSlots& slots, const Step& step, int32_t request) {
    SequenceRows rows{};
    rows.begin = step.query_start_loc[request];
    rows.border = rows.end = step.query_start_loc[request + 1];
    rows.is_first = rows.begin < rows.end && step.positions[rows.begin] == 0;
    rows.state = slots.data + step.state_slots[request] * slots.stride;
    if (step.state_saves && step.state_saves[2 * request + 1] >= 0) {
        rows.border = rows.begin + step.state_saves[2 * request];
        rows.saved = slots.data + step.state_saves[2 * request + 1] * slots.stride;
    }
    return rows;
}

}  // namespace
}  // namespace octavo
