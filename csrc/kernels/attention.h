// The attention operations: write keys and values of the step, then let every query row attend.
//
// Steps with one token per request need no barrier: the worker for a (request, kv head) pair writes its key and value
// first. A latent is the exception, because several workers read it. If such a step has too few pairs for all workers,
// the workers share the splits and merge them after a barrier. All other steps write everything, wait, and then take
// query blocks from a common counter.
#pragma once

#include "kernel.h"
#if defined(OCTAVO_ISA_amx)
#include "attention_amx.h"
#else
#include "attention_block.h"
#endif

namespace octavo {
namespace {

// RMSNorm of each head.
struct HeadNorm {
    bool used;
    const float* weight;  // [head_dim], or null for no norm
};

// Where the step's queries, keys and values come from, and how each head is prepared.
struct AttentionInputs {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;  // floats from token to token
    const float *q_rope, *k_rope;          // for a latent: the last columns of the heads, side by side
    RopeTable rope;                        // null frequencies: no rope
    HeadNorm q_norm, k_norm, v_norm;
    const float* key_offset;  // what an int8 cache subtracts from keys, [num_kv_heads, head_dim], or null
    float eps;
};

struct AttentionTask {
    AttentionShape shape;
    KvType kv_type;
    AttentionInputs in;
    bool writes;  // whether this operation writes the keys and values; otherwise another one has written them
    View output;
    const LayerCache* cache;
};

// Both operations contain AttentionParams; F is the signature of either. A value_dim of 0 means head_dim.
template <typename F>
KvDims kv_dims_of(const Args& args) {
    const auto dim = [&args](int index) { return static_cast<int32_t>(args.ints[index]); };
    return {dim(F::num_kv_heads), dim(F::head_dim), dim(args.ints[F::value_dim] ? F::value_dim : F::head_dim)};
}

template <typename F>
KvType kv_type_of(const Args& args) {
    return static_cast<KvType>(args.ints[F::kv_type]);
}

template <typename F>
AttentionShape attention_shape(const Args& args) {
    const KvDims dims = kv_dims_of<F>(args);
    AttentionShape shape{};
    shape.num_heads = static_cast<int32_t>(args.ints[F::num_heads]);
    shape.num_kv_heads = dims.heads;
    shape.group = shape.num_heads / shape.num_kv_heads;
    shape.head_dim = dims.key;
    shape.value_dim = dims.value;
    shape.padded_dim = kv_padded_dim(shape.value_dim);
    shape.window = static_cast<int32_t>(args.ints[F::window]);
    shape.scale = args.floats[F::scale];
    shape.softcap = args.floats[F::softcap];
    shape.slopes = args.weights[F::alibi_slopes].data;
    shape.query_scales = args.weights[F::query_scales].data;
    shape.num_query_scales = args.weights[F::query_scales].size;
    shape.scale_length = args.ints[F::scale_length];
    shape.scale_offset = args.ints[F::scale_offset];
    shape.chunked = args.ints[F::chunked] != 0;
    shape.sees_spans = args.ints[F::sees_spans] != 0;
    return shape;
}

// The fields of a task that both operations share.
template <typename F>
AttentionTask attention_task(const Args& args) {
    AttentionTask task{};
    task.shape = attention_shape<F>(args);
    task.kv_type = kv_type_of<F>(args);
    task.in.key_offset = args.weights[F::key_mean].data;
    task.output = args.output;
    task.cache = args.cache;
    return task;
}

inline HeadCache cache_of(const AttentionTask& task, KvType type, int32_t kv_head) {
    return head_cache(type, *task.cache, task.shape.latent ? 0 : kv_head, kv_dims(task.shape));
}

template <typename F>
size_t attention_cache_bytes(const Args& args, int32_t block_size) {
    return kv_block_bytes(kv_type_of<F>(args), kv_dims_of<F>(args), block_size);
}

inline void rms_norm_head(const float* x, const float* weight, const AttentionInputs& in, int32_t n, float* out) {
    F32x16 squares = broadcast(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const F32x16 lanes = n - i >= 16 ? load(x + i) : load_partial(x + i, n - i);
        squares = fma(lanes, lanes, squares);
    }
    const float scale = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + in.eps);
    for (int32_t i = 0; i < n; ++i) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

// out = rope(norm(x)) for one head, with the cos_sin of its token. Like write_token it is compiled once and called from
// several places: both loop over a whole head, so a call costs little and inlined copies would take longer to compile.
__attribute__((noinline)) inline void prepare_head(const AttentionTask& task, const float* x, HeadNorm norm,
                                                   const float* cos_sin, float* out) {
    const int32_t n = task.shape.head_dim;
    if (norm.used) rms_norm_head(x, norm.weight, task.in, n, out);
    const float* from = norm.used ? out : x;
    if (task.in.rope.frequencies)
        rotate_head(task.in.rope, cos_sin, from, out, n);
    else if (!norm.used)
        __builtin_memcpy(out, x, sizeof(float) * n);
}

// Joins head `head` of a latent's q or k, whose columns are in two values. token: its row in them.
inline void join_head(const AttentionShape& s, const float* x, int64_t stride, const float* rope, int64_t token,
                      int32_t head, float* out) {
    const int64_t rope_dim = s.head_dim - s.value_dim, heads = stride / s.value_dim;
    __builtin_memcpy(out, x + token * stride + static_cast<int64_t>(head) * s.value_dim, sizeof(float) * s.value_dim);
    __builtin_memcpy(out + s.value_dim, rope + (token * heads + head) * rope_dim, sizeof(float) * rope_dim);
}

// The offset of a kv head's keys, or null.
inline const float* key_offset(const AttentionTask& task, int32_t kv_head) {
    return task.in.key_offset ? task.in.key_offset + static_cast<int64_t>(kv_head) * task.shape.head_dim : nullptr;
}

inline void take_offset_off(HalfCache, const AttentionTask&, int32_t, float*) {}
inline void take_offset_off(Int8Cache, const AttentionTask& task, int32_t kv_head, float* key) {
    const float* offset = key_offset(task, kv_head);
    for (int32_t i = 0; offset && i < task.shape.head_dim; ++i) key[i] = key[i] - offset[i];
}

// Prepares a query for mixed keys, and returns its product with their offset.
inline float ready_query(HalfCache, const AttentionTask&, int32_t, float*) { return 0.0f; }
inline float ready_query(Int8Cache, const AttentionTask& task, int32_t kv_head, float* query) {
    const float* offset = key_offset(task, kv_head);
    float product = 0.0f;
    for (int32_t i = 0; offset && i < task.shape.head_dim; ++i) product = product + query[i] * offset[i];
    mix_query(query, task.shape.head_dim);
    return product;
}

// `buffer` has room for one head of keys or values, as floats.
template <typename Cache>
__attribute__((noinline)) void write_token(const AttentionTask& task, const Step& step, int32_t token, int32_t kv_head,
                                           const float* cos_sin, float* buffer) {
    const HeadCache cache = cache_of(task, Cache::type, kv_head);
    if (task.shape.latent) {
        join_head(task.shape, task.in.k, task.in.k_stride, task.in.k_rope, token, 0, buffer);
        return write_key(Cache{}, cache, step.slot_mapping[token], buffer);
    }
    const float* key = task.in.k + token * task.in.k_stride + static_cast<int64_t>(kv_head) * task.shape.head_dim;
    const float* value = task.in.v + token * task.in.v_stride + static_cast<int64_t>(kv_head) * task.shape.value_dim;
    prepare_head(task, key, task.in.k_norm, cos_sin, buffer);
    take_offset_off(Cache{}, task, kv_head, buffer);
    write_key(Cache{}, cache, step.slot_mapping[token], buffer);
    if (task.in.v_norm.used) {
        rms_norm_head(value, task.in.v_norm.weight, task.in, task.shape.value_dim, buffer);
        value = buffer;
    }
    write_value(Cache{}, cache, step.slot_mapping[token], value);
}

inline float query_scale(const AttentionShape& s, int32_t position) {
    if (!s.query_scales) return s.scale;
    const int64_t i = (position + s.scale_offset) / s.scale_length;
    return s.scale * s.query_scales[i < s.num_query_scales ? i : s.num_query_scales - 1];
}

// Whether this level computes with tiles. Splitting keys and values pays off only if enough heads share them: compared
// with floats, three heads take 1.3 times as long for one row and 0.45 for a prompt; a single head 1.9 and 0.52.
constexpr int32_t LEAST_TILE_GROUP = 3;
template <typename Cache>
inline bool uses_tiles([[maybe_unused]] const AttentionShape& s) {
#if defined(OCTAVO_ISA_amx)
    return !Cache::scaled && !s.latent && s.group >= LEAST_TILE_GROUP;
#else
    return false;
#endif
}

// Loads the queries of `count` tokens from `token` on. cos_sin: tables for those tokens, `table_stride` apart.
template <typename Cache>
inline void load_queries(const AttentionTask& task, QueryBlock& block, int32_t token, int32_t count,
                         const float* cos_sin, int64_t table_stride) {
    const AttentionShape& s = task.shape;
    block.rows = count * s.group;
    float* out = block.q;
    for (int32_t t = 0; t < count; ++t) {
        const int32_t width = s.latent ? s.value_dim : s.head_dim;
        const float* from =
            task.in.q + (token + t) * task.in.q_stride + static_cast<int64_t>(block.kv_head) * s.group * width;
        // Rows of q are too far apart for the hardware prefetcher.
        if (t + 1 < count)
            for (int32_t i = 0; i < s.group * width; i += 16) __builtin_prefetch(from + task.in.q_stride + i);
        const float scale = query_scale(s, block.first_position + t);
        for (int32_t g = 0; g < s.group; ++g, from += width, out += s.head_dim) {
            if (s.latent)
                join_head(s, task.in.q, task.in.q_stride, task.in.q_rope, token + t, block.kv_head * s.group + g, out);
            else
                prepare_head(task, from, task.in.q_norm, cos_sin + t * table_stride, out);
            for (int32_t i = 0; i < s.head_dim; ++i) out[i] = out[i] * scale;
            block.base[t * s.group + g] = ready_query(Cache{}, task, block.kv_head, out);
        }
    }
#if defined(OCTAVO_ISA_amx)
    if (uses_tiles<Cache>(s)) split_queries(s, block);
#endif
}

// Takes pieces of a region, each aligned to 64 bytes. Without a base it only measures.
struct Carver {
    char* base;
    size_t used = 0;
    template <typename T>
    T* take(size_t count) {
        T* piece = reinterpret_cast<T*>(base + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return base ? piece : nullptr;
    }
};

// The number of tokens in a block of about `rows` rows.
inline int32_t block_tokens(const AttentionShape& shape, int32_t rows) {
    return shape.group < rows ? rows / shape.group : 1;
}

inline QueryBlock carve_block(const AttentionTask& task, Carver& carver) {
    const AttentionShape& s = task.shape;
    const size_t rows = (static_cast<size_t>(block_tokens(s, BLOCK_ROWS)) * s.group + 15) / 16 * 16;
    const size_t panel_width = s.head_dim > CHUNK ? s.head_dim : CHUNK;
    QueryBlock block{};
    block.q = carver.take<float>(rows * s.head_dim);
    block.base = carver.take<float>(rows);
    block.out = carver.take<float>(rows * s.padded_dim);
    block.split_out = carver.take<float>(rows * s.padded_dim);
    block.sum = carver.take<float>(rows * 16);
    block.split_sum = carver.take<float>(rows * 16);
    block.max = carver.take<float>(rows);
    block.split_max = carver.take<float>(rows);
    block.rescale = carver.take<float>(rows);
    block.scores = carver.take<float>(rows * SCORES_OF_ROW);
    block.panel = carver.take<float>(panel_width * KV_GROUP * PANEL_VECTORS);
    block.gathered = carver.take<char>(GATHERED_KEYS / KV_GROUP * gathered_group_bytes(task.kv_type, kv_dims(s)));
    block.cos_sin = carver.take<float>(2 * static_cast<size_t>(task.in.rope.half) +
                                       (s.head_dim > s.value_dim ? s.head_dim : s.value_dim));
#if defined(OCTAVO_ISA_amx)
    block.tile_q = carver.take<char>(rows * split_row_bytes(s.head_dim));
    block.units = carver.take<char>(units_bytes(s.head_dim, s.padded_dim));
#endif
    return block;
}

// The splits that the block's rows see: [begin, end).
inline Interval visible_splits(const AttentionShape& shape, const QueryBlock& block) {
    const Interval keys = visible_keys(shape, block, 0, block.rows - 1);
    return {keys.begin / SPLIT, (keys.end - 1) / SPLIT + 1};
}

inline void select_request(const Step& step, int32_t request, int32_t kv_head, QueryBlock& block) {
    block.kv_head = kv_head;
    block.seq_len = step.seq_lens[request];
    block.block_table = step.block_tables + static_cast<int64_t>(request) * step.block_table_stride;
}

// Attends from the block to the keys of one split: fills split_out, split_sum and split_max.
template <typename Cache>
inline void attend_keys(const AttentionShape& s, const HeadCache& cache, const QueryBlock& block, int32_t split) {
#if defined(OCTAVO_ISA_amx)
    if constexpr (!Cache::scaled)
        if (uses_tiles<Cache>(s)) return attend_split_tiles(s, cache, block, split);
#endif
    attend_split<Cache>(s, cache, block, split);
}

// Attends to everything that the loaded block sees and writes its output, for the tokens from `token` on.
template <typename Cache>
inline void attend_block(const AttentionTask& task, QueryBlock block, int32_t token) {
    const AttentionShape& s = task.shape;
    if (block.seq_len == 0) {  // no rows in the other domain
        const int64_t width = static_cast<int64_t>(s.group) * s.value_dim;
        for (int32_t row = 0; row < block.rows; row += s.group)
            __builtin_memset(task.output.data + static_cast<int64_t>(token + row / s.group) * task.output.cols +
                                 block.kv_head * width,
                             0, sizeof(float) * width);
        return;
    }
    const HeadCache cache = cache_of(task, Cache::type, block.kv_head);
    const Interval splits = visible_splits(s, block);
    for (int32_t split = splits.begin; split < splits.end; ++split) {
        attend_keys<Cache>(s, cache, block, split);
        if (split == splits.begin)
            adopt_split(block);
        else
            merge_block(s, block);
    }
    for (int32_t row = 0; row < block.rows; ++row) {
        const int32_t head = block.kv_head * s.group + row % s.group;
        finish_row(s, total_of(s, block, row), head,
                   task.output.data + static_cast<int64_t>(token + row / s.group) * task.output.cols +
                       static_cast<int64_t>(head) * s.value_dim);
    }
}

}  // namespace
}  // namespace octavo
