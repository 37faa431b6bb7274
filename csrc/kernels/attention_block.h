// Attention of a block of query rows: consecutive tokens of one request times the heads of one kv head.
//
// Every row is computed in the same way, alone or in any block: keys in chunks of 64 with an online softmax (Milakov
// and Gimelshein, arXiv 1805.02867), and chunks in splits of 256 keys that start from scratch and are merged in order.
// Chunks and splits have fixed positions in the sequence, so another thread can compute a split without changing a bit.
#pragma once

#include "attention_cache.h"
#include "attention_softmax.h"
#include "attention_tile.h"
#include "rope.h"

namespace octavo {
namespace {

constexpr int SPLIT = 256;  // keys whose results are merged as one
#if defined(OCTAVO_ISA_amx)
constexpr int BLOCK_ROWS = 384;            // rows of a prefill block: 12 pairs of tiles of attention_amx.h
constexpr int SCORES_OF_ROW = SPLIT + 16;  // floats; not a power of two, or rows would compete for the same cache sets
constexpr int GATHERED_KEYS = SPLIT;
#else
constexpr int BLOCK_ROWS = 168;  // rows of a prefill block: 28 full tiles
constexpr int SCORES_OF_ROW = CHUNK;
constexpr int GATHERED_KEYS = CHUNK;
#endif
constexpr int PANEL_ROWS = 12;  // from this many rows on, keys and values are converted once for all tiles

struct AttentionShape {
    // One key per token for all heads, whose first columns are its value. A kv head is then a subset of the queries.
    bool latent;
    int32_t num_heads, num_kv_heads;
    int32_t group;                  // query heads per kv head
    int32_t head_dim;               // of queries and keys
    int32_t value_dim, padded_dim;  // width of values, and the same rounded up to 16
    int32_t window;                 // 0: no window
    bool chunked;                   // a token sees only its own chunk of `window` positions, up to itself
    bool sees_all;                  // a token sees all keys of its sequence, which come from another domain
    bool sees_spans;                // a token also sees the later keys of its span
    float scale, softcap;
    const float* slopes;         // ALiBi [num_heads] or null
    const float* sinks;          // [num_heads] or null
    const float* distance_bias;  // see DistanceBias; [distance_bias_size] or null
    int64_t distance_bias_size;
    const float* query_scales;  // [num_query_scales], one for each scale_length positions, or null
    int64_t num_query_scales, scale_length, scale_offset;
};

inline KvDims kv_dims(const AttentionShape& s) {
    return s.latent ? KvDims{1, s.head_dim, 0} : KvDims{s.num_kv_heads, s.head_dim, s.value_dim};
}

// One query block and its working memory.
struct QueryBlock {
    int32_t rows;            // row r belongs to token r / group and head r % group
    int32_t first_position;  // of the block's first token
    int32_t kv_head;
    int32_t seq_len;
    const int32_t* last_seen;  // the last position that each token sees; null: its own
    const int32_t* block_table;
    float* q;     // [rows, head_dim], scaled
    float* base;  // [rows], see QueryRows
    // Results of the splits so far, and of the current one.
    float *out, *split_out;  // [rows, padded_dim]
    float *sum, *split_sum;  // [rows, 16]
    float *max, *split_max;  // [rows, padded to 16]
    float* rescale;          // [rows]
    float* scores;           // [rows, CHUNK], or [rows, SCORES_OF_ROW]
    float* panel;            // keys or values of one panel as float32
    char* gathered;          // a chunk or split of small blocks, laid side by side
    float* cos_sin;          // for one token
    char *tile_q, *units;    // attention_amx.h: split queries; keys or values for some tiles
};

struct Interval {
    int32_t begin, end;
    bool empty() const { return begin >= end; }
};

inline Interval intersect(Interval a, int32_t begin, int32_t end) {
    return {a.begin > begin ? a.begin : begin, a.end < end ? a.end : end};
}

// The first position that a token sees.
inline int32_t first_visible(const AttentionShape& shape, int32_t position) {
    if (shape.window == 0) return 0;
    if (shape.chunked) return position / shape.window * shape.window;
    return position >= shape.window ? position - shape.window + 1 : 0;
}

// The union of the positions that rows [first, last_row] see.
inline Interval visible_keys(const AttentionShape& shape, const QueryBlock& block, int32_t first, int32_t last_row) {
    if (shape.sees_all) return {0, block.seq_len};
    const int32_t low = block.first_position + first / shape.group;
    const int32_t high = block.first_position + last_row / shape.group;
    if (!block.last_seen) return {first_visible(shape, low), high + 1};
    // It never decreases from token to token. Whatever the step claims, the sequence has no key past its end.
    const int32_t last = block.last_seen[last_row / shape.group];
    const int32_t end = last > high ? last + 1 : high + 1;
    return {first_visible(shape, low), end < block.seq_len ? end : block.seq_len};
}

// The transformations of a row's scores for the keys from position `start` on.
inline ScoreRule rule_of(const AttentionShape& shape, const QueryBlock& block, int32_t row, int32_t start) {
    const int32_t head = block.kv_head * shape.group + row % shape.group;
    const int32_t position = block.first_position + row / shape.group;
    return {shape.softcap, shape.slopes ? shape.slopes[head] : 0.0f, static_cast<float>(start - position),
            distance_bias_of(shape.distance_bias, shape.distance_bias_size, shape.num_heads, head)};
}
inline bool has_rule(const AttentionShape& shape) {
    return shape.softcap != 0.0f || shape.slopes || shape.distance_bias;
}

struct Tiles {
    int32_t rows, count;
    int32_t begin(int32_t i) const { return rows * i / count; }
    int32_t size(int32_t i) const { return begin(i + 1) - begin(i); }
};
inline Tiles tiles_of(int32_t rows) { return {rows, (rows + TILE_ROWS - 1) / TILE_ROWS}; }

// The keys of one chunk that a block sees: positions from `start` on.
struct ChunkKeys {
    int32_t start;  // position of its first key
    Interval keys;  // relative to start
};

// And their addresses. Scales are set if the cache has any.
template <typename Cache>
struct Chunk : ChunkKeys {
    const typename Cache::Element* key_groups[CHUNK / KV_GROUP];
    const Scale* key_scales[CHUNK / KV_GROUP];
    const typename Cache::Element* value_groups[CHUNK / KV_GROUP];
    const Scale* value_scales[CHUNK / KV_GROUP];
    const typename Cache::Element* next_key_groups[CHUNK / KV_GROUP];  // fetched while the values are used
};

inline Interval tile_keys(const AttentionShape& shape, const QueryBlock& block, const ChunkKeys& chunk, int32_t first,
                          int32_t last) {
    const Interval seen = visible_keys(shape, block, first, last);
    return intersect({seen.begin - chunk.start, seen.end - chunk.start}, 0, CHUNK);
}

inline QueryRows query_rows(const AttentionShape& shape, const QueryBlock& block, int32_t row) {
    return {block.q + static_cast<int64_t>(row) * shape.head_dim, block.base + row};
}

template <typename Cache>
inline void score_direct(const AttentionShape& shape, const QueryBlock& block, const Chunk<Cache>& chunk) {
    const Keys<typename Cache::Element> all{chunk.key_groups, chunk.key_scales, chunk.value_groups, shape.head_dim};
    const Tiles tiles = tiles_of(block.rows);
    for (int32_t i = 0; i < tiles.count; ++i) {
        const int32_t row = tiles.begin(i);
        const Interval keys = tile_keys(shape, block, chunk, row, row + tiles.size(i) - 1);
        if (keys.empty()) continue;
        score_groups<Cache::scaled>(tiles.size(i), query_rows(shape, block, row), all, keys.begin / KV_GROUP,
                                    (keys.end + KV_GROUP - 1) / KV_GROUP, block.scores + row * CHUNK);
    }
}

template <typename Cache>
inline void score_panels(const AttentionShape& shape, const QueryBlock& block, const Chunk<Cache>& chunk) {
    const Tiles tiles = tiles_of(block.rows);
    const int32_t panel_size = shape.head_dim * KV_GROUP;
    const int end_group = (chunk.keys.end + KV_GROUP - 1) / KV_GROUP;
    for (int g = chunk.keys.begin / KV_GROUP; g < end_group; g += PANEL_VECTORS) {
        const int width = end_group - g < PANEL_VECTORS ? end_group - g : PANEL_VECTORS;
        const float* groups[PANEL_VECTORS];
        for (int n = 0; n < width; ++n) {
            float* to = block.panel + n * panel_size;
            for (int32_t i = 0; i < panel_size; i += 16) store(to + i, load_lanes(chunk.key_groups[g + n] + i));
            groups[n] = to;
        }
        for (int32_t i = 0; i < tiles.count; ++i) {
            const int32_t row = tiles.begin(i);
            const Interval keys = tile_keys(shape, block, chunk, row, row + tiles.size(i) - 1);
            if (intersect(keys, g * KV_GROUP, (g + width) * KV_GROUP).empty()) continue;
            score_groups<Cache::scaled>(tiles.size(i), query_rows(shape, block, row),
                                        Keys<float>{groups, chunk.key_scales + g, groups, shape.head_dim}, 0, width,
                                        block.scores + row * CHUNK + g * KV_GROUP);
        }
    }
}

// Turns the scores of one tile into probabilities. Scores computed only for a neighbouring row become zero.
inline void softmax_rows(const AttentionShape& shape, const QueryBlock& block, const ChunkKeys& chunk, int32_t first,
                         int32_t count) {
    const Interval seen = tile_keys(shape, block, chunk, first, first + count - 1);
    const bool ruled = has_rule(shape);
    const Interval common =
        intersect(tile_keys(shape, block, chunk, first, first),
                  tile_keys(shape, block, chunk, first + count - 1, first + count - 1).begin, CHUNK);
    const bool plain = !ruled && common.begin == 0 && common.end == CHUNK;
    RowScores rows[TILE_ROWS];
    for (int32_t r = 0; r < count; ++r) {
        const int32_t row = first + r;
        float* scores = block.scores + row * CHUNK;
        rows[r].scores = scores;
        if (plain) continue;
        const Interval keys = tile_keys(shape, block, chunk, row, row);
        rows[r] = {scores, keys.begin, keys.end, rule_of(shape, block, row, chunk.start)};
        const Interval own = keys.empty() ? Interval{seen.end, seen.end} : keys;
        for (int32_t k = seen.begin; k < own.begin; ++k) scores[k] = 0.0f;
        for (int32_t k = own.end; k < seen.end; ++k) scores[k] = 0.0f;
    }
    softmax_tile(rows, count, plain, {block.split_max + first, block.split_sum + first * 16, block.rescale + first});
}

inline void softmax_block(const AttentionShape& shape, const QueryBlock& block, const ChunkKeys& chunk) {
    const Tiles tiles = tiles_of(block.rows);
    for (int32_t i = 0; i < tiles.count; ++i) softmax_rows(shape, block, chunk, tiles.begin(i), tiles.size(i));
}

// Multiplies probabilities by the scales of their values.
template <typename Cache>
inline void scale_probabilities(const QueryBlock& block, const Chunk<Cache>& chunk) {
    for (int g = chunk.keys.begin / KV_GROUP; g * KV_GROUP < chunk.keys.end; ++g) {
        const F32x16 scale = load_scales(chunk.value_scales[g]);
        float* lanes = block.scores + g * KV_GROUP;
        for (int32_t row = 0; row < block.rows; ++row, lanes += CHUNK) store(lanes, load(lanes) * scale);
    }
}

template <typename Cache>
inline void values_direct(const AttentionShape& shape, const QueryBlock& block, const Chunk<Cache>& chunk) {
    const Tiles tiles = tiles_of(block.rows);
    for (int32_t i = 0; i < tiles.count; ++i) {
        const int32_t row = tiles.begin(i);
        const Interval keys = tile_keys(shape, block, chunk, row, row + tiles.size(i) - 1);
        if (keys.empty()) continue;
        const ValueRows<typename Cache::Element> values{chunk.value_groups, chunk.next_key_groups, shape.padded_dim,
                                                        keys.begin, keys.end};
        add_values(tiles.size(i), block.scores + row * CHUNK, values, shape.padded_dim, block.rescale + row,
                   block.split_out + static_cast<int64_t>(row) * shape.padded_dim, shape.padded_dim);
    }
}

// Fills columns [column, column + width) of the values that some row sees, as floats [CHUNK][width].
template <typename Cache>
inline void fill_value_panel(const AttentionShape& shape, const QueryBlock& block, const Chunk<Cache>& chunk,
                             int32_t column, int32_t width) {
    if constexpr (!Cache::scaled) {
        for (int g = chunk.keys.begin / KV_GROUP; shape.latent && g * KV_GROUP < chunk.keys.end; ++g)
            for (int32_t c = 0; c < width; c += 16)
                load_columns(chunk.key_groups[g] + (column + c) * KV_GROUP, block.panel + g * KV_GROUP * width + c,
                             width);
        if (shape.latent) return;
    }
    for (int32_t k = chunk.keys.begin; k < chunk.keys.end; ++k) {
        const typename Cache::Element* from =
            chunk.value_groups[k / KV_GROUP] + k % KV_GROUP * shape.padded_dim + column;
        for (int32_t c = 0; c < width; c += 16) store(block.panel + k * width + c, load_lanes(from + c));
    }
}

template <typename Cache>
inline void values_panels(const AttentionShape& shape, const QueryBlock& block, const Chunk<Cache>& chunk) {
    const Tiles tiles = tiles_of(block.rows);
    for (int32_t column = 0; column < shape.padded_dim; column += 16 * PANEL_VECTORS) {
        const int32_t rest = shape.padded_dim - column;
        const int32_t width = rest < 16 * PANEL_VECTORS ? rest : 16 * PANEL_VECTORS;
        const float* groups[CHUNK / KV_GROUP];
        for (int g = 0; g < CHUNK / KV_GROUP; ++g) groups[g] = block.panel + g * KV_GROUP * width;
        fill_value_panel(shape, block, chunk, column, width);
        for (int32_t i = 0; i < tiles.count; ++i) {
            const int32_t row = tiles.begin(i);
            const Interval keys = tile_keys(shape, block, chunk, row, row + tiles.size(i) - 1);
            if (keys.empty()) continue;
            add_values(tiles.size(i), block.scores + row * CHUNK,
                       ValueRows<float>{groups, groups, width, keys.begin, keys.end}, width, block.rescale + row,
                       block.split_out + static_cast<int64_t>(row) * shape.padded_dim + column, shape.padded_dim);
        }
    }
}

inline void start_split(const AttentionShape& shape, const QueryBlock& block) {
    __builtin_memset(block.split_out, 0, sizeof(float) * block.rows * shape.padded_dim);
    __builtin_memset(block.split_sum, 0, sizeof(float) * block.rows * 16);
    for (int32_t row = 0; row < block.rows; ++row) block.split_max[row] = NO_SCORE;
}

// Keys from group `g` of the sequence on, to be fetched early; `own` if there are none or they must be gathered.
template <typename Cache>
inline const typename Cache::Element* keys_ahead(const HeadCache& cache, const QueryBlock& block, int32_t g,
                                                 const typename Cache::Element* own) {
    if (cache.block_size < KV_GROUP || g * KV_GROUP >= block.seq_len) return own;
    return find_group<Cache>(cache, block.block_table, g, block.seq_len, nullptr).keys;
}

// The chunk of keys from position `start` on, of which the block sees `seen`.
template <typename Cache>
inline Chunk<Cache> find_chunk(const HeadCache& cache, const QueryBlock& block, int32_t start, Interval seen) {
    Chunk<Cache> chunk;
    chunk.start = start;
    chunk.keys = intersect({seen.begin - start, seen.end - start}, 0, CHUNK);
    for (int g = chunk.keys.begin / KV_GROUP; g * KV_GROUP < chunk.keys.end; ++g) {
        char* buffer = block.gathered + g * gathered_group_bytes(Cache::type, cache.dims);
        const int32_t group = start / KV_GROUP + g;
        const KeyGroup<Cache> found = find_group<Cache>(cache, block.block_table, group, block.seq_len, buffer);
        chunk.key_groups[g] = found.keys;
        chunk.key_scales[g] = found.key_scales;
        chunk.value_groups[g] = found.values;
        chunk.value_scales[g] = found.value_scales;
        chunk.next_key_groups[g] = keys_ahead<Cache>(cache, block, group + CHUNK / KV_GROUP, found.keys);
    }
    return chunk;
}

// Attends from the block to the keys of one split: fills split_out, split_sum and split_max. Keys and values are in
// pieces too small for the hardware prefetcher, so each half of the work fetches data for the other.
template <typename Cache>
inline void attend_split(const AttentionShape& shape, const HeadCache& cache, const QueryBlock& block, int32_t split) {
    start_split(shape, block);
    const Interval seen = intersect(visible_keys(shape, block, 0, block.rows - 1), split * SPLIT, (split + 1) * SPLIT);
    for (int32_t start = seen.begin / CHUNK * CHUNK; start < seen.end; start += CHUNK) {
        const Chunk<Cache> chunk = find_chunk<Cache>(cache, block, start, seen);
        const bool panels = block.rows >= PANEL_ROWS;
        if (panels)
            score_panels(shape, block, chunk);
        else
            score_direct(shape, block, chunk);
        softmax_block(shape, block, chunk);
        if constexpr (Cache::scaled) scale_probabilities(block, chunk);
        if (panels || shape.latent)
            values_panels(shape, block, chunk);
        else
            values_direct(shape, block, chunk);
    }
}

// The result of one row: out [columns], sum [16], max.
struct RowState {
    float *out, *sum, *max;
};

inline RowState total_of(const AttentionShape& shape, const QueryBlock& b, int32_t row) {
    return {b.out + static_cast<int64_t>(row) * shape.padded_dim, b.sum + row * 16, b.max + row};
}
inline RowState split_of(const AttentionShape& shape, const QueryBlock& b, int32_t row) {
    return {b.split_out + static_cast<int64_t>(row) * shape.padded_dim, b.split_sum + row * 16, b.split_max + row};
}

inline void scale_and_add(const RowState& total, const RowState& split, float a, float b, int32_t columns) {
    const F32x16 wa = broadcast(a), wb = broadcast(b);
    store(total.sum, load(total.sum) * wa + load(split.sum) * wb);
    for (int32_t c = 0; c < columns; c += 16) store(total.out + c, load(total.out + c) * wa + load(split.out + c) * wb);
}

inline void merge_row(const RowState& total, const RowState& split, int32_t columns) {
    const float new_max = *split.max > *total.max ? *split.max : *total.max;
    scale_and_add(total, split, exp_scalar(*total.max - new_max), exp_scalar(*split.max - new_max), columns);
    *total.max = new_max;
}

// As above, for all rows of a block.
inline void merge_block(const AttentionShape& shape, const QueryBlock& block) {
    for (int32_t first = 0; first < block.rows; first += 16) {
        const F32x16 total_max = load(block.max + first), split_max = load(block.split_max + first);
        const F32x16 new_max = max(split_max, total_max);
        float a[16], b[16];
        store(a, exp(total_max - new_max));
        store(b, exp(split_max - new_max));
        store(block.max + first, new_max);
        for (int32_t row = first; row < block.rows && row < first + 16; ++row)
            scale_and_add(total_of(shape, block, row), split_of(shape, block, row), a[row - first], b[row - first],
                          shape.padded_dim);
    }
}

// Makes the current split the total, because the first one has nothing to be merged with.
inline void adopt_split(QueryBlock& block) {
    const auto swap = [](float*& x, float*& y) {
        float* const old = x;
        x = y;
        y = old;
    };
    swap(block.out, block.split_out);
    swap(block.sum, block.split_sum);
    swap(block.max, block.split_max);
}

// Finishes a row into out[value_dim]. `head` selects the sink.
inline void finish_row(const AttentionShape& shape, const RowState& total, int32_t head, float* out) {
    float sum = reduce_add(load(total.sum)), factor = 1.0f;
    if (shape.sinks) {
        const float sink = shape.sinks[head], new_max = sink > *total.max ? sink : *total.max;
        factor = exp_scalar(*total.max - new_max);
        sum = sum * factor + exp_scalar(sink - new_max);
    }
    const F32x16 scale = broadcast(factor / sum);
    for (int32_t c = 0; c < shape.value_dim; c += 16) {
        const int n = shape.value_dim - c < 16 ? shape.value_dim - c : 16;
        const F32x16 lanes = load(total.out + c) * scale;
        if (n == 16)
            store(out + c, lanes);
        else
            store_partial(out + c, lanes, n);
    }
}

}  // namespace
}  // namespace octavo
