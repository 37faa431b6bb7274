// The two products of attention on register tiles of up to six query rows.
//
// Each result is one chain of fused multiply-adds in ascending order of dimensions (scores) or keys (values),
// whatever the tile: a row's bits depend neither on its neighbours nor on the instruction set.
#pragma once

#include "attention_cache.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int CHUNK = 64;     // keys between two updates of the running maximum
constexpr int TILE_ROWS = 6;  // query rows of a register tile

template <int Value>
struct Int {
    static constexpr int value = Value;
};

// Vectors side by side in a tile of `rows` rows: enough chains to hide the latency of fma, few enough to stay in
// registers.
constexpr int tile_vectors(int rows) {
#if defined(__AVX512F__)
    return rows <= 4 ? 4 : 2;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}
constexpr int PANEL_VECTORS = tile_vectors(TILE_ROWS);

// Keeps the compiler from holding broadcast operands in registers that the sums need: it would spill those.
inline void broadcast_again() { asm volatile("" ::: "memory"); }

// Keys of several groups. `scales` is null unless the cache has scales; the keys are then codes, as T.
template <typename T>
struct Keys {
    const T* const* groups;      // each [head_dim][16]
    const Scale* const* scales;  // each [key scales][16]
    int32_t head_dim;
    Keys from(int group) const { return {groups + group, scales ? scales + group : nullptr, head_dim}; }
};

// sum[row][n] = q[row] . keys[n] over dimensions [begin, end)
template <int M, int N, typename T>
inline void multiply_keys(const float* q, const Keys<T>& keys, int32_t begin, int32_t end, F32x16 (&sum)[M][N]) {
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sum[m][n] = broadcast(0.0f);
    for (int32_t d = begin; d < end; ++d) {
        for (int n = 0; n < N; ++n) {
            broadcast_again();
            const F32x16 b = load_lanes(keys.groups[n] + d * KV_GROUP);
            for (int m = 0; m < M; ++m) sum[m][n] = fma(broadcast(q[m * keys.head_dim + d]), b, sum[m][n]);
        }
    }
}

// Query rows of a tile. `base`: what is added to all scores of a row, if the cache has scales.
struct QueryRows {
    const float* q;  // [rows, head_dim]
    const float* base;
};

// scores[row][16 n + lane] = q[row] . keys[n][.][lane]; with scales, base[row] and the sum over their pieces of
// scale * product.
template <int M, int N, bool Scaled, typename T>
inline void score_tile(const QueryRows& queries, const Keys<T>& keys, float* scores) {
    F32x16 sum[M][N];
    if constexpr (!Scaled) {
        multiply_keys(queries.q, keys, 0, keys.head_dim, sum);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) store(scores + m * CHUNK + n * 16, sum[m][n]);
        return;
    }
    for (int32_t d = 0, piece = 0; d < keys.head_dim; d += KV_SCALE_DIMS, ++piece) {
        multiply_keys(queries.q, keys, d, d + KV_SCALE_DIMS < keys.head_dim ? d + KV_SCALE_DIMS : keys.head_dim, sum);
        for (int n = 0; n < N; ++n) {
            const F32x16 scale = load_scales(keys.scales[n] + piece * KV_GROUP);
            for (int m = 0; m < M; ++m) {
                float* const to = scores + m * CHUNK + n * 16;
                store(to, fma(sum[m][n], scale, piece == 0 ? broadcast(queries.base[m]) : load(to)));
            }
        }
    }
}

// Values of a chunk: `groups` of sixteen rows with `stride` elements from one to the next.
template <typename T>
struct ValueRows {
    const T* const* groups;
    int64_t stride;
    int32_t begin, end;  // keys of the chunk that some row of the tile sees
};

// out[row] = out[row] * rescale[row] + sum over keys of probabilities[row][key] * values[key], 16 N columns.
template <int M, int N, typename T>
inline void value_tile(const float* probabilities, const ValueRows<T>& values, int64_t column, const float* rescale,
                       float* out, int64_t out_stride) {
    F32x16 sum[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sum[m][n] = load(out + m * out_stride + n * 16) * broadcast(rescale[m]);
    for (int32_t k = values.begin; k < values.end;) {
        const int32_t stop = (k / KV_GROUP + 1) * KV_GROUP;
        const int32_t group_end = stop < values.end ? stop : values.end;
        const T* row = values.groups[k / KV_GROUP] + k % KV_GROUP * values.stride + column;
        for (; k < group_end; ++k, row += values.stride) {
            for (int n = 0; n < N; ++n) {
                broadcast_again();
                const F32x16 b = load_lanes(row + n * 16);
                for (int m = 0; m < M; ++m) sum[m][n] = fma(broadcast(probabilities[m * CHUNK + k]), b, sum[m][n]);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(out + m * out_stride + n * 16, sum[m][n]);
}

// Calls f(Int<rows>): rows becomes a constant of the tile.
template <typename F>
inline void with_rows(int rows, F f) {
    switch (rows) {
        case 1:
            return f(Int<1>{});
        case 2:
            return f(Int<2>{});
        case 3:
            return f(Int<3>{});
        case 4:
            return f(Int<4>{});
        case 5:
            return f(Int<5>{});
        default:
            return f(Int<6>{});
    }
}

// Scores of a tile against groups [begin, end) of the chunk; keys and scores point to those of group 0.
template <bool Scaled, typename T>
inline void score_groups(int rows, const QueryRows& queries, const Keys<T>& keys, int begin, int end, float* scores) {
    with_rows(rows, [&](auto tile) {
        constexpr int M = decltype(tile)::value, N = tile_vectors(M);
        int g = begin;
        for (; g + N <= end; g += N) score_tile<M, N, Scaled>(queries, keys.from(g), scores + g * 16);
        for (; g < end; ++g) score_tile<M, 1, Scaled>(queries, keys.from(g), scores + g * 16);
    });
}

// All `columns` (a multiple of 16) of `out` for a tile.
template <typename T>
inline void add_values(int rows, const float* probabilities, const ValueRows<T>& values, int64_t columns,
                       const float* rescale, float* out, int64_t out_stride) {
    with_rows(rows, [&](auto tile) {
        constexpr int M = decltype(tile)::value, N = tile_vectors(M);
        int64_t c = 0;
        for (; c + 16 * N <= columns; c += 16 * N)
            value_tile<M, N>(probabilities, values, c, rescale, out + c, out_stride);
        for (; c < columns; c += 16) value_tile<M, 1>(probabilities, values, c, rescale, out + c, out_stride);
    });
}

}  // namespace
}  // namespace octavo
