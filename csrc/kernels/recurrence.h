// Recurrent states that grow by an outer product per token, in independent tiles of 16 columns.
//
// In numpy, a head's state has `rows` rows and `cols` columns. Here it is split into tiles of 16 columns (the last one
// may be narrower), stored row by row. A tile of 128 rows takes 8 KB and stays in the L1 cache for a block of tokens.
#pragma once

#include "activations.h"
#include "elementwise.h"
#include "state.h"

namespace octavo {
namespace {

constexpr int TOKEN_BLOCK = 16;  // tokens whose factors are computed together

// log(1 + e^x): x or 0, plus log1p(u) for u = e^-|x|, as 2 atanh(u / (2 + u)). Its series ends at the 15th power with
// an error below 1e-8.
inline F32x16 softplus(F32x16 x) {
    const F32x16 u = exp(broadcast(0.0f) - abs(x));
    const F32x16 s = u / (broadcast(2.0f) + u), z = s * s;
    F32x16 p = broadcast(1.0f / 15);
    p = fma(p, z, broadcast(1.0f / 13));
    p = fma(p, z, broadcast(1.0f / 11));
    p = fma(p, z, broadcast(1.0f / 9));
    p = fma(p, z, broadcast(1.0f / 7));
    p = fma(p, z, broadcast(1.0f / 5));
    p = fma(p, z, broadcast(1.0f / 3));
    p = fma(p, z, broadcast(1.0f));
    return max(broadcast(0.0f), x) + broadcast(2.0f) * s * p;
}

// Column `col` of up to 16 rows of a value, from row `first` on.
inline F32x16 read_column(const View& value, int64_t first, int count, int64_t col) {
    float lanes[TOKEN_BLOCK] = {};
    for (int i = 0; i < count; ++i) lanes[i] = value.data[(first + i) * value.cols + col];
    return load(lanes);
}

struct HeadState {
    int64_t heads, rows, cols;

    int64_t tiles() const { return (cols + 15) / 16; }
    // The offset of a tile's first element; its columns.
    int64_t offset(int64_t head, int64_t index) const { return head * rows * cols + index * 16 * rows; }
    ColumnRange columns(int64_t index) const {
        return {index * 16, static_cast<int>(cols - index * 16 < 16 ? cols - index * 16 : 16)};
    }
};

// Calls advance(head, tile begin, tile end, first token, number of tokens, state of the sequence) for this worker's
// tiles, in blocks of up to TOKEN_BLOCK tokens of every sequence.
template <typename F>
inline void for_each_block(const HeadState& shape, const Args& args, const Step& step, const Worker& worker,
                           F advance) {
    const int64_t tiles = shape.tiles();
    const Range units = share(shape.heads * tiles, worker);
    for (int64_t unit = units.begin; unit < units.end;) {
        const int64_t head = unit / tiles, first = unit % tiles;
        const int64_t last = units.end - head * tiles < tiles ? units.end - head * tiles : tiles;
        // Tiles are adjacent, from `offset` to `stop`.
        const int64_t offset = shape.offset(head, first);
        const int64_t stop = last == tiles ? shape.offset(head + 1, 0) : shape.offset(head, last);
        for (int32_t request = 0; request < step.num_requests; ++request) {
            const SequenceRows rows = sequence_rows(*args.state, step, request);
            if (rows.is_first) __builtin_memset(rows.state + offset, 0, (stop - offset) * sizeof(float));
            for (int32_t t = rows.begin; t < rows.end;) {
                const int32_t border = rows.border(t);
                const int count = border - t < TOKEN_BLOCK ? border - t : TOKEN_BLOCK;
                advance(head, first, last, t, count, rows.state);
                t += count;
                if (float* saved = rows.saved(t))
                    __builtin_memcpy(saved + offset, rows.state + offset, (stop - offset) * sizeof(float));
            }
        }
        unit = head * tiles + last;
    }
}

}  // namespace
}  // namespace octavo
