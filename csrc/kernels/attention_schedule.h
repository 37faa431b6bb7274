// How the work of an attention operation is divided among threads; attention.h describes the three kinds of steps.
#pragma once

#include "attention.h"

namespace octavo {
namespace {

// The region shared by all workers.
struct AttentionShared {
    int32_t* next_item;  // query blocks handed out so far
    float* cos_sin;      // [tokens, 2 half]
    float* partials;     // results of single splits: [pair, split, group] rows of `partial_floats` each
};

inline size_t partial_floats(const AttentionShape& s) { return static_cast<size_t>(s.padded_dim) + 32; }

inline RowState partial_row(const AttentionShape& s, float* partials, int64_t row) {
    float* base = partials + row * partial_floats(s);
    return {base, base + s.padded_dim, base + s.padded_dim + 16};
}

inline void copy_row(const RowState& to, const RowState& from, int32_t columns) {
    __builtin_memcpy(to.out, from.out, sizeof(float) * columns);
    __builtin_memcpy(to.sum, from.sum, sizeof(float) * 16);
    *to.max = *from.max;
}

// Whether there are so few (request, kv head) pairs that their splits are shared out.
inline bool has_few_pairs(const AttentionShape& s, int64_t num_requests, int32_t num_workers) {
    return num_workers > 1 && num_requests * s.num_kv_heads < 4 * static_cast<int64_t>(num_workers);
}

inline int32_t max_splits(const AttentionShape& s, int64_t max_seq_len) {
    const int64_t keys = s.window > 0 && s.window < max_seq_len ? s.window + 2 * SPLIT : max_seq_len;
    return static_cast<int32_t>((keys + SPLIT - 1) / SPLIT);
}

inline AttentionShared carve_shared(const AttentionTask& task, const Step& limits, size_t partial_rows,
                                    Carver& carver) {
    AttentionShared shared{};
    shared.next_item = carver.take<int32_t>(16);
    shared.cos_sin = carver.take<float>(2 * static_cast<size_t>(task.in.rope.half) * limits.num_tokens);
    shared.partials = carver.take<float>(partial_rows * partial_floats(task.shape));
    return shared;
}

inline ScratchSizes attention_scratch_sizes(const AttentionTask& task, const Step& limits, int32_t num_workers) {
    const AttentionShape& s = task.shape;
    Carver own{nullptr}, shared{nullptr};
    carve_block(task, own);
    int64_t requests = limits.num_requests;
    while (requests > 0 && !has_few_pairs(s, requests, num_workers)) --requests;
    // The stride equals the largest number of tokens in a sequence.
    const int64_t splits = max_splits(s, limits.block_table_stride);
    carve_shared(task, limits, static_cast<size_t>(requests * s.num_heads * splits), shared);
    return {own.used, shared.used};
}

// Starts the one token of a request: loads its queries, and writes its key and value if `write` is set.
template <typename Cache>
inline void begin_pair(const AttentionTask& task, const Step& step, int32_t request, int32_t kv_head, bool write,
                       QueryBlock& block) {
    const int32_t token = step.query_start_loc[request];
    select_request(step, request, kv_head, block);
    block.first_position = step.positions[token];
    block.last_seen = nullptr;  // a single token is the last of its span
    if (task.in.rope.frequencies) compute_cos_sin(task.in.rope, step.domain(DOMAIN_TOKENS), token, block.cos_sin);
    load_queries<Cache>(task, block, token, 1, block.cos_sin, 0);
    if (write && task.writes && !task.shape.latent)
        write_token<Cache>(task, step, token, kv_head, block.cos_sin, block.cos_sin + 2 * task.in.rope.half);
}

inline int64_t decode_cost(const AttentionShape& s, int32_t seq_len) {
    return 32 + seq_len - first_visible(s, seq_len - 1);
}

// One token per request, many pairs: contiguous shares of about equal cost.
template <typename Cache>
inline void attend_pairs(const AttentionTask& task, const Step& step, const Worker& worker, QueryBlock& block) {
    const AttentionShape& s = task.shape;
    int64_t total = 0, before = 0;
    for (int32_t r = 0; r < step.num_requests; ++r) total += decode_cost(s, step.seq_lens[r]) * s.num_kv_heads;
    for (int32_t r = 0; r < step.num_requests; ++r) {
        const int64_t cost = decode_cost(s, step.seq_lens[r]);
        for (int32_t h = 0; h < s.num_kv_heads; ++h, before += cost) {
            if ((before + cost / 2) * worker.count / total != worker.index) continue;
            begin_pair<Cache>(task, step, r, h, true, block);
            attend_block<Cache>(task, block, step.query_start_loc[r]);
        }
    }
}

// The splits for the one token of a request: [begin, end).
inline Interval decode_splits(const AttentionShape& s, int32_t seq_len) {
    return {first_visible(s, seq_len - 1) / SPLIT, (seq_len - 1) / SPLIT + 1};
}

// One token per request, few pairs: shares out the splits of all pairs, and merges them by rows after a barrier.
template <typename Cache>
inline void attend_splits(const AttentionTask& task, const Step& step, Worker& worker, QueryBlock& block,
                          const AttentionShared& shared) {
    const AttentionShape& s = task.shape;
    int64_t total = 0, before = 0;
    for (int32_t r = 0; r < step.num_requests; ++r) {
        const Interval splits = decode_splits(s, step.seq_lens[r]);
        total += static_cast<int64_t>(splits.end - splits.begin) * s.num_kv_heads;
    }
    const int64_t from = total * worker.index / worker.count, to = total * (worker.index + 1) / worker.count;
    for (int32_t r = 0; r < step.num_requests; ++r) {
        const Interval splits = decode_splits(s, step.seq_lens[r]);
        for (int32_t h = 0; h < s.num_kv_heads; ++h, before += splits.end - splits.begin) {
            const int64_t first = from > before ? from - before : 0;
            const int64_t count = splits.end - splits.begin, end = to - before < count ? to - before : count;
            if (first >= end) continue;
            begin_pair<Cache>(task, step, r, h, end == count, block);  // the last split contains the new key
            const HeadCache cache = cache_of(task, Cache::type, h);
            for (int64_t i = first; i < end; ++i) {
                QueryBlock part = block;
                attend_keys<Cache>(s, cache, part, splits.begin + static_cast<int32_t>(i));
                for (int32_t row = 0; row < part.rows; ++row) {
                    copy_row(partial_row(s, shared.partials, (before + i) * s.group + row), split_of(s, part, row),
                             s.padded_dim);
                }
            }
        }
    }
}

inline void merge_splits(const AttentionTask& task, const Step& step, const Worker& worker, const QueryBlock& block,
                         const AttentionShared& shared) {
    const AttentionShape& s = task.shape;
    const int64_t rows = static_cast<int64_t>(step.num_requests) * s.num_heads;
    int64_t index = 0, before = 0;
    const RowState total = total_of(s, block, 0);
    for (int32_t r = 0; r < step.num_requests; ++r) {
        const Interval splits = decode_splits(s, step.seq_lens[r]);
        const int64_t count = splits.end - splits.begin;
        for (int32_t head = 0; head < s.num_heads; ++head, ++index) {
            if (index * worker.count / rows != worker.index) continue;
            const int64_t pair = before + head / s.group * count;
            copy_row(total, partial_row(s, shared.partials, pair * s.group + head % s.group), s.padded_dim);
            for (int64_t i = 1; i < count; ++i)
                merge_row(total, partial_row(s, shared.partials, (pair + i) * s.group + head % s.group), s.padded_dim);
            finish_row(s, total, head,
                       task.output.data + static_cast<int64_t>(step.query_start_loc[r]) * task.output.cols +
                           static_cast<int64_t>(head) * s.value_dim);
        }
        before += count * s.num_kv_heads;
    }
}

// For any step: writes the keys and values of all tokens.
template <typename Cache>
inline void write_all(const AttentionTask& task, const Step& step, const Worker& worker, const QueryBlock& block,
                      const AttentionShared& shared) {
    const int64_t tokens = step.num_tokens, end = tokens * (worker.index + 1) / worker.count;
    for (int64_t t = tokens * worker.index / worker.count; t < end; ++t) {
        const int32_t token = static_cast<int32_t>(t);
        float* cos_sin = shared.cos_sin + t * 2 * task.in.rope.half;
        if (task.in.rope.frequencies) compute_cos_sin(task.in.rope, step.domain(DOMAIN_TOKENS), t, cos_sin);
        for (int32_t h = 0; task.writes && h < kv_dims(task.shape).heads; ++h)
            write_token<Cache>(task, step, token, h, cos_sin, block.cos_sin + 2 * task.in.rope.half);
    }
}

// Tokens per query block. Large blocks convert keys and values less often; small ones give every worker a share.
inline int32_t block_width(const AttentionShape& s, const Step& step, int32_t num_workers) {
    const int64_t rows = static_cast<int64_t>(step.num_tokens) * s.num_heads;
    return block_tokens(s, rows < 8LL * BLOCK_ROWS * num_workers ? BLOCK_ROWS / 2 : BLOCK_ROWS);
}

// The last positions that the tokens from `token` on see; null: their own. They are the second positions component.
inline const int32_t* last_seen_of(const AttentionShape& s, const Step& step, int32_t token) {
    const bool has_spans = s.sees_spans && step.token_components && step.num_token_components > 1;
    return has_spans ? step.token_components + step.num_tokens + token : nullptr;
}

// Query blocks of all requests. The last ones see the most keys, so they come first.
template <typename Cache>
inline void attend_queries(const AttentionTask& task, const Step& step, int32_t num_workers, QueryBlock& block,
                           const AttentionShared& shared) {
    const AttentionShape& s = task.shape;
    const int32_t width = block_width(s, step, num_workers);
    int32_t item = __atomic_fetch_add(shared.next_item, 1, __ATOMIC_RELAXED), before = 0;
    for (int32_t r = step.num_requests - 1; r >= 0; --r) {
        const int32_t begin = step.query_start_loc[r], end = step.query_start_loc[r + 1];
        const int32_t blocks = (end - begin + width - 1) / width;
        for (; item < before + blocks * s.num_kv_heads;
             item = __atomic_fetch_add(shared.next_item, 1, __ATOMIC_RELAXED)) {
            const int32_t b = blocks - 1 - (item - before) / s.num_kv_heads;
            const int32_t token = begin + b * width, count = end - token < width ? end - token : width;
            select_request(step, r, (item - before) % s.num_kv_heads, block);
            block.first_position = step.positions[token];
            block.last_seen = last_seen_of(s, step, token);
            const int64_t table_stride = 2 * static_cast<int64_t>(task.in.rope.half);
            load_queries<Cache>(task, block, token, count, shared.cos_sin + token * table_stride, table_stride);
            attend_block<Cache>(task, block, token);
        }
        before += blocks * s.num_kv_heads;
    }
}

inline bool is_decode_step(const Step& step) {
    if (step.num_tokens != step.num_requests) return false;
    for (int32_t r = 0; r < step.num_requests; ++r)
        if (step.query_start_loc[r + 1] - step.query_start_loc[r] != 1) return false;
    return true;
}

template <typename Cache>
void run_on_cache(const AttentionTask& task, const Step& step, Worker& worker, void* shared_scratch) {
    Carver own{static_cast<char*>(worker.scratch)}, region{static_cast<char*>(shared_scratch)};
    QueryBlock block = carve_block(task, own);
    const AttentionShared shared = carve_shared(task, step, 0, region);
#if defined(OCTAVO_ISA_amx)
    if (uses_tiles<Cache>(task.shape)) configure_row_tiles(is_decode_step(step) ? task.shape.group : BLOCK_ROWS);
#endif
    if (is_decode_step(step)) {
        if (task.shape.latent) {
            write_all<Cache>(task, step, worker, block, shared);
            worker.barrier();
        }
        if (!has_few_pairs(task.shape, step.num_requests, worker.count)) {
            attend_pairs<Cache>(task, step, worker, block);
            return;
        }
        attend_splits<Cache>(task, step, worker, block, shared);
        worker.barrier();
        merge_splits(task, step, worker, block, shared);
        return;
    }
    if (worker.index == 0) *shared.next_item = 0;
    write_all<Cache>(task, step, worker, block, shared);
    worker.barrier();
    attend_queries<Cache>(task, step, worker.count, block, shared);
}

// For tokens that attend to the cache of another domain. rows: that domain's step, with its rows as tokens.
template <typename Cache>
void run_across(const AttentionTask& task, const Step& step, const Step& rows, Worker& worker, void* shared_scratch) {
    Carver own{static_cast<char*>(worker.scratch)}, region{static_cast<char*>(shared_scratch)};
    QueryBlock block = carve_block(task, own);
    const AttentionShared shared = carve_shared(task, step, 0, region);
#if defined(OCTAVO_ISA_amx)
    if (uses_tiles<Cache>(task.shape)) configure_row_tiles(BLOCK_ROWS);
#endif
    if (worker.index == 0) *shared.next_item = 0;
    write_all<Cache>(task, rows, worker, block, shared);
    worker.barrier();
    attend_queries<Cache>(task, step, worker.count, block, shared);
}

// The step as a layer of a cache group sees it, with only that group's block tables and slots.
inline Step step_of_group(const Step& step, int32_t group) {
    Step own = step;
    own.block_tables += static_cast<int64_t>(group) * step.num_requests * step.block_table_stride;
    own.slot_mapping += static_cast<int64_t>(group) * step.num_tokens;
    return own;
}

void run_attention(const AttentionTask& task, const Step& all, Worker& worker, void* shared_scratch) {
    const Step step = step_of_group(all, task.cache->group);
    if (task.kv_type == KvType::int8)
        run_on_cache<Int8Cache>(task, step, worker, shared_scratch);
    else
        run_on_cache<HalfCache>(task, step, worker, shared_scratch);
}

void run_cross_attention(const AttentionTask& task, const Step& all, const DomainRows& domain, Worker& worker,
                         void* shared_scratch) {
    Step step = step_of_group(all, task.cache->group);
    step.seq_lens = domain.lengths;
    Step rows = step;
    rows.num_tokens = domain.count;
    rows.slot_mapping = domain.slots ? domain.slots + static_cast<int64_t>(task.cache->group) * domain.count : nullptr;
    if (task.kv_type == KvType::int8)
        run_across<Int8Cache>(task, step, rows, worker, shared_scratch);
    else
        run_across<HalfCache>(task, step, rows, worker, shared_scratch);
}

}  // namespace
}  // namespace octavo
