// The two products of attention on register tiles of up to six query rows.
//
// Each result is one chain of fused multiply-adds in ascending order of dimensions (scores) or keys (values) in every
// tile. A row's bits therefore depend neither on its neighbours nor on the instruction set.
#pragma once

#include "attention_cache.h"
#include "simd.h"
#include "unroll.h"

namespace octavo {
namespace {

constexpr int CHUNK = 64;     // keys between two updates of the running maximum
constexpr int TILE_ROWS = 6;  // query rows per register tile

// Number of adjacent vectors in a tile of `rows` rows: enough chains to hide the latency of fma, few enough to stay in
// registers.
constexpr int tile_vectors(int rows) {
#if defined(__AVX512F__)
    return rows <= 4 ? 4 : 2;
#else
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#endif
}
constexpr int PANEL_VECTORS = tile_vectors(TILE_ROWS);

// Keeps the compiler from holding broadcast operands in registers that the sums need, which would spill the sums.
inline void broadcast_again() { asm volatile("" ::: "memory"); }

// Prefetches data that is needed soon. Floats come from a panel, which is in the cache already.
template <typename T>
inline void fetch(const T* p) {
    __builtin_prefetch(p);
}
inline void fetch(const float*) {}

// Keys of several groups. If the cache has scales, the keys are codes of type T; otherwise `scales` is null.
template <typename T>
struct Keys {
    const T* const* groups;      // each [head_dim][16]
    const Scale* const* scales;  // each [key scales][16]
    const T* const* ahead;       // data to prefetch meanwhile, as large as the groups
    int32_t head_dim;
    Keys from(int group) const { return {groups + group, scales ? scales + group : nullptr, ahead + group, head_dim}; }
};

// sum[row][n] = fma(factors[row], lanes of vectors(n), sum[row][n]), the factors `stride` apart.
template <int M, int N, typename Vectors>
__attribute__((always_inline)) inline void add_products(const float* factors, int64_t stride, const Vectors& vectors,
                                                        F32x16 (&sum)[M][N]) {
    unroll<N>([&](auto n) __attribute__((always_inline)) {
        broadcast_again();
        const F32x16 lanes = load_lanes(vectors(n.value));
        unroll<M>([&](auto m) __attribute__((always_inline)) {
            sum[m.value][n.value] = fma(broadcast(factors[m.value * stride]), lanes, sum[m.value][n.value]);
        });
    });
}

// sum[row][n] = q[row] . keys[n] over dimensions [begin, end)
template <int M, int N, typename T>
__attribute__((always_inline)) inline void multiply_keys(const float* q, const Keys<T>& keys, int32_t begin,
                                                         int32_t end, F32x16 (&sum)[M][N]) {
    const T *groups[N], *ahead[N];
    unroll<N>([&](auto n) {
        groups[n.value] = keys.groups[n.value];
        ahead[n.value] = keys.ahead[n.value];
    });
    unroll<M * N>([&](auto i) { sum[i.value / N][i.value % N] = broadcast(0.0f); });
    const int64_t stride = keys.head_dim;
    const auto add = [&](int32_t d) __attribute__((always_inline)) {
        add_products(q + d, stride, [&](int n) { return groups[n] + d * KV_GROUP; }, sum);
    };
    int32_t d = begin;
    // Two at a time, because they form one cache line of float16.
    for (; d + 2 <= end; d += 2) {
        unroll<N>([&](auto n) { fetch(ahead[n.value] + d * KV_GROUP); });
        add(d);
        add(d + 1);
    }
    if (d < end) add(d);
}

// Query rows of a tile. `base`: added to all scores of a row, if the cache has scales.
struct QueryRows {
    const float* q;  // [rows, head_dim]
    const float* base;
};

// scores[row][16 n + lane] = q[row] . keys[n][.][lane]. With scales: base[row] plus the sum of scale * product over the
// pieces.
template <int M, int N, bool Scaled, typename T>
inline void score_tile(const QueryRows& queries, const Keys<T>& keys, float* scores) {
    F32x16 sum[M][N];
    if constexpr (!Scaled) {
        multiply_keys(queries.q, keys, 0, keys.head_dim, sum);
        unroll<M * N>([&](auto i) {
            constexpr int m = i.value / N, n = i.value % N;
            store(scores + m * CHUNK + n * 16, sum[m][n]);
        });
        return;
    }
    for (int32_t d = 0, piece = 0; d < keys.head_dim; d += KV_SCALE_DIMS, ++piece) {
        multiply_keys(queries.q, keys, d, d + KV_SCALE_DIMS < keys.head_dim ? d + KV_SCALE_DIMS : keys.head_dim, sum);
        unroll<N>([&](auto n) {
            const F32x16 scale = load_scales(keys.scales[n.value] + piece * KV_GROUP);
            unroll<M>([&](auto m) {
                float* const to = scores + m.value * CHUNK + n.value * 16;
                store(to, fma(sum[m.value][n.value], scale, piece == 0 ? broadcast(queries.base[m.value]) : load(to)));
            });
        });
    }
}

// Values of a chunk: `groups` of 16 rows, `stride` elements apart.
template <typename T>
struct ValueRows {
    const T* const* groups;
    const T* const* ahead;  // data to prefetch meanwhile, as large as the groups
    int64_t stride;
    int32_t begin, end;  // keys of the chunk that any row of the tile sees
};

// out[row] = out[row] * rescale[row] + sum over keys of probabilities[row][key] * values[key], 16 N columns.
template <int M, int N, typename T>
inline void value_tile(const float* probabilities, const ValueRows<T>& values, int64_t column, const float* rescale,
                       float* out, int64_t out_stride) {
    F32x16 sum[M][N];
    unroll<M * N>([&](auto i) {
        constexpr int m = i.value / N, n = i.value % N;
        sum[m][n] = load(out + m * out_stride + n * 16) * broadcast(rescale[m]);
    });
    const int64_t stride = values.stride;
    const int32_t end = values.end;
    for (int32_t k = values.begin; k < end;) {
        const int32_t stop = (k / KV_GROUP + 1) * KV_GROUP;
        const int32_t group_end = stop < end ? stop : end;
        const int64_t first = k % KV_GROUP * stride;
        const T* row = values.groups[k / KV_GROUP] + first + column;
        const T* ahead = values.ahead[k / KV_GROUP] + first + 2 * column;
        const auto add_row = [&]() __attribute__((always_inline)) {
            add_products(probabilities + k, CHUNK, [&](int n) { return row + n * 16; }, sum);
            row += stride;
            ++k;
        };
        // Two at a time: together, the tiles of all columns prefetch two rows.
        for (; k + 2 <= group_end; ahead += 2 * stride) {
            unroll<N>([&](auto n) { fetch(ahead + 32 * n.value); });
            add_row();
            add_row();
        }
        if (k < group_end) add_row();
    }
    unroll<M * N>([&](auto i) {
        constexpr int m = i.value / N, n = i.value % N;
        store(out + m * out_stride + n * 16, sum[m][n]);
    });
}

// Calls f(Int<rows>), which makes `rows` a compile-time constant.
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

// Computes a tile's scores for groups [begin, end) of the chunk. `keys` and `scores` point to those of group 0.
template <bool Scaled, typename T>
inline void score_groups(int rows, const QueryRows& queries, const Keys<T>& keys, int begin, int end, float* scores) {
    with_rows(rows, [&](auto tile) {
        constexpr int M = decltype(tile)::value, N = tile_vectors(M);
        int g = begin;
        for (; g + N <= end; g += N) score_tile<M, N, Scaled>(queries, keys.from(g), scores + g * 16);
        for (; g < end; ++g) score_tile<M, 1, Scaled>(queries, keys.from(g), scores + g * 16);
    });
}

// Updates all `columns` (a multiple of 16) of `out` for a tile.
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
