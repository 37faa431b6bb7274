// EncoderAttention: every row attends to all rows of its text in this step, in both directions, without a cache. A text
// is a sequence of the domain that the rows belong to.
//
// A work item is a block of queries of one head and one text. It packs the keys and values that it sees, chunk by
// chunk. Chunks have fixed positions in the text, so a row's bits do not depend on its neighbours.
#include "attention_softmax.h"
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(EncoderAttention, (q, k, v), (alibi_slopes, distance_bias, distance_keys, distance_queries),
                 (num_heads, num_kv_heads, head_dim, window), (scale, softcap));

constexpr int ENCODER_ROWS = 16 * TILE_ROWS;  // queries per work item

struct EncoderShape {
    int32_t num_heads, group, head_dim, padded_dim, window;
    float scale, softcap;
    const float* slopes;         // ALiBi [num_heads] or null
    const float* distance_bias;  // see DistanceBias; [distance_bias_size] or null
    int64_t distance_bias_size;
    const float *distance_keys, *distance_queries;  // see DistanceVectors; null: none
    int32_t reach;                                  // reach of the distance vectors
};

inline EncoderShape encoder_shape(const Args& args) {
    const auto dim = [&args](int index) { return static_cast<int32_t>(args.ints[index]); };
    const int32_t heads = dim(EncoderAttention::num_heads), head_dim = dim(EncoderAttention::head_dim);
    const Weight &keys = args.weights[EncoderAttention::distance_keys],
                 &queries = args.weights[EncoderAttention::distance_queries];
    return {heads,
            heads / dim(EncoderAttention::num_kv_heads),
            head_dim,
            (head_dim + 15) / 16 * 16,
            dim(EncoderAttention::window),
            args.floats[EncoderAttention::scale],
            args.floats[EncoderAttention::softcap],
            args.weights[EncoderAttention::alibi_slopes].data,
            args.weights[EncoderAttention::distance_bias].data,
            static_cast<int64_t>(args.weights[EncoderAttention::distance_bias].size),
            keys.data,
            queries.data,
            static_cast<int32_t>((keys.data ? keys : queries).size / (static_cast<int64_t>(heads) * head_dim) / 2)};
}

// A head's vectors by distance of key and query, [head_dim][2 * reach + 1] each, or null. A score includes the product
// of the query with the vector in `keys`, and of the key with the vector in `queries`.
struct DistanceVectors {
    const float *keys, *queries;
    int32_t reach;
};

inline DistanceVectors distance_vectors_of(const EncoderShape& s, int64_t head) {
    const int64_t skipped = head * s.head_dim * (2 * static_cast<int64_t>(s.reach) + 1);
    return {s.distance_keys ? s.distance_keys + skipped : nullptr,
            s.distance_queries ? s.distance_queries + skipped : nullptr, s.reach};
}

// One worker's scratch memory.
struct EncoderScratch {
    float* q;        // [rows, head_dim], scaled
    float* keys;     // one chunk: [CHUNK / 16][head_dim][16]
    float* values;   // one chunk: [CHUNK][padded_dim]
    float* scores;   // [rows, CHUNK]
    float* out;      // [rows, padded_dim]
    float* sum;      // [rows, 16]
    float* max;      // [rows]
    float* rescale;  // [rows]
};

// Returns the size of the scratch in floats. Sets the pointers in `to` unless it is null.
inline size_t place_scratch(const EncoderShape& s, float* base, EncoderScratch* to) {
    size_t used = 0;
    const auto take = [&](size_t count) {
        float* const piece = base + used;
        used += (count + 15) / 16 * 16;
        return base ? piece : nullptr;
    };
    EncoderScratch scratch{};
    scratch.q = take(static_cast<size_t>(ENCODER_ROWS) * s.head_dim);
    scratch.keys = take(static_cast<size_t>(CHUNK) * s.head_dim);
    scratch.values = take(static_cast<size_t>(CHUNK) * s.padded_dim);
    scratch.scores = take(static_cast<size_t>(ENCODER_ROWS) * CHUNK);
    scratch.out = take(static_cast<size_t>(ENCODER_ROWS) * s.padded_dim);
    scratch.sum = take(ENCODER_ROWS * 16);
    scratch.max = take(ENCODER_ROWS);
    scratch.rescale = take(ENCODER_ROWS);
    if (to) *to = scratch;
    return used;
}

// The keys [begin, end) of a text of `length` tokens that all, or any, of the queries [first, last] see.
struct Seen {
    int32_t begin, end;
};
inline Seen seen_keys(const EncoderShape& s, int32_t first, int32_t last, int32_t length) {
    if (s.window == 0) return {0, length};
    const int32_t begin = first - s.window > 0 ? first - s.window : 0;
    return {begin, length - last > s.window ? last + s.window + 1 : length};
}
inline Seen in_chunk(const Seen& keys, int32_t start) {
    const int32_t begin = keys.begin > start ? keys.begin - start : 0;
    return {begin, keys.end - start < CHUNK ? keys.end - start : CHUNK};
}

// The input of one work item: the first row of its text in q, k and v, and the columns of its heads.
struct EncoderItem {
    const float *q, *k, *v;
    float* out;
    int64_t q_stride, kv_stride;
    int32_t first, rows, length;  // queries [first, first + rows) of `length` tokens
    float slope;                  // ALiBi slope of the head; 0: none
    DistanceBias bias;
    DistanceVectors vectors;
};

inline void load_rows(const EncoderShape& s, const EncoderItem& item, const EncoderScratch& scratch) {
    for (int32_t row = 0; row < item.rows; ++row) {
        const float* from = item.q + (item.first + row) * item.q_stride;
        float* to = scratch.q + static_cast<int64_t>(row) * s.head_dim;
        for (int32_t i = 0; i < s.head_dim; ++i) to[i] = from[i] * s.scale;
        scratch.max[row] = NO_SCORE;
    }
    __builtin_memset(scratch.out, 0, sizeof(float) * item.rows * s.padded_dim);
    __builtin_memset(scratch.sum, 0, sizeof(float) * item.rows * 16);
}

// Loads keys and values from position `start` on, followed by zeros.
inline void load_chunk(const EncoderShape& s, const EncoderItem& item, int32_t start, int32_t count,
                       const EncoderScratch& scratch) {
    const int32_t groups = (count + 15) / 16;
    for (int32_t g = 0; g < groups; ++g) {
        float* to = scratch.keys + static_cast<int64_t>(g) * 16 * s.head_dim;
        for (int32_t lane = 0; lane < 16; ++lane) {
            const int32_t key = g * 16 + lane;
            const float* from = item.k + (start + key) * item.kv_stride;
            if (key < count)
                for (int32_t i = 0; i < s.head_dim; ++i) to[i * 16 + lane] = from[i];
            else
                for (int32_t i = 0; i < s.head_dim; ++i) to[i * 16 + lane] = 0.0f;
        }
    }
    for (int32_t key = 0; key < count; ++key) {
        float* to = scratch.values + static_cast<int64_t>(key) * s.padded_dim;
        __builtin_memcpy(to, item.v + (start + key) * item.kv_stride, sizeof(float) * s.head_dim);
        for (int32_t i = s.head_dim; i < s.padded_dim; ++i) to[i] = 0.0f;
    }
}

// Subtracts slope * |key - query| from the scores in the groups of `seen`. distance: that of the chunk's first key.
inline void lower_by_distance(float* scores, const Seen& seen, float slope, float distance) {
    for (int32_t g = seen.begin / 16; g * 16 < seen.end; ++g) {
        const F32x16 after = load(LANE_INDEX) + broadcast(distance + static_cast<float>(g * 16));
        const F32x16 apart = max(after, broadcast(0.0f) - after);
        store(scores + g * 16, load(scores + g * 16) - broadcast(slope) * apart);
    }
}

// Adds the distance terms to the scores of one row. q: scaled. keys: the chunk's, packed. distance: that of the chunk's
// first key.
inline void add_distance_terms(const EncoderShape& s, const DistanceVectors& vectors, const float* q, const float* keys,
                               const Seen& seen, int32_t distance, float* scores) {
    const int64_t width = 2 * static_cast<int64_t>(vectors.reach) + 1;
    for (int32_t g = seen.begin / 16; g * 16 < seen.end; ++g) {
        const float* packed = keys + static_cast<int64_t>(g) * 16 * s.head_dim;
        const int32_t first = distance + g * 16;
        F32x16 of_query = broadcast(0.0f), of_key = broadcast(0.0f);
        for (int32_t i = 0; i < s.head_dim; ++i) {
            if (vectors.keys)
                of_query = fma(broadcast(q[i]), load_bias({vectors.keys + i * width, vectors.reach}, first), of_query);
            if (vectors.queries)
                of_key =
                    fma(load(packed + i * 16), load_bias({vectors.queries + i * width, vectors.reach}, first), of_key);
        }
        store(scores + g * 16, fma(of_key, broadcast(s.scale), load(scores + g * 16) + of_query));
    }
}

// Adds a chunk to rows [row, row + count), at most TILE_ROWS of them.
inline void attend_tile(const EncoderShape& s, const EncoderItem& item, int32_t start, int32_t row, int32_t count,
                        const EncoderScratch& scratch) {
    const int32_t first = item.first + row;
    const Seen seen = in_chunk(seen_keys(s, first, first + count - 1, item.length), start);
    if (seen.begin >= seen.end) return;
    const float *keys[CHUNK / 16], *values[CHUNK / 16];
    for (int g = 0; g < CHUNK / 16; ++g) {
        keys[g] = scratch.keys + static_cast<int64_t>(g) * 16 * s.head_dim;
        values[g] = scratch.values + static_cast<int64_t>(g) * 16 * s.padded_dim;
    }
    float* const scores = scratch.scores + static_cast<int64_t>(row) * CHUNK;
    score_groups<false>(count, {scratch.q + static_cast<int64_t>(row) * s.head_dim, nullptr},
                        Keys<float>{keys, nullptr, keys, s.head_dim}, seen.begin / 16, (seen.end + 15) / 16, scores);
    RowScores rows[TILE_ROWS];
    for (int32_t r = 0; r < count; ++r) {
        float* const own = scores + r * CHUNK;
        if (item.vectors.keys || item.vectors.queries)
            add_distance_terms(s, item.vectors, scratch.q + static_cast<int64_t>(row + r) * s.head_dim, scratch.keys,
                               seen, start - first - r, own);
        if (item.slope != 0.0f) lower_by_distance(own, seen, item.slope, static_cast<float>(start - first - r));
        const Seen mine = in_chunk(seen_keys(s, first + r, first + r, item.length), start);
        const Seen kept = mine.begin < mine.end ? mine : Seen{seen.end, seen.end};
        for (int32_t key = seen.begin; key < kept.begin; ++key) own[key] = 0.0f;
        for (int32_t key = kept.end; key < seen.end; ++key) own[key] = 0.0f;
        rows[r] = {own, mine.begin, mine.end, {s.softcap, 0.0f, static_cast<float>(start - first - r), item.bias}};
    }
    softmax_tile(rows, count, false, {scratch.max + row, scratch.sum + row * 16, scratch.rescale + row});
    add_values(count, scores, ValueRows<float>{values, values, s.padded_dim, seen.begin, seen.end}, s.padded_dim,
               scratch.rescale + row, scratch.out + static_cast<int64_t>(row) * s.padded_dim, s.padded_dim);
}

inline void attend_item(const EncoderShape& s, const EncoderItem& item, const EncoderScratch& scratch) {
    load_rows(s, item, scratch);
    const Seen all = seen_keys(s, item.first, item.first + item.rows - 1, item.length);
    for (int32_t start = all.begin / CHUNK * CHUNK; start < all.end; start += CHUNK) {
        load_chunk(s, item, start, item.length - start < CHUNK ? item.length - start : CHUNK, scratch);
        for (int32_t row = 0; row < item.rows; row += TILE_ROWS)
            attend_tile(s, item, start, row, item.rows - row < TILE_ROWS ? item.rows - row : TILE_ROWS, scratch);
    }
    for (int32_t row = 0; row < item.rows; ++row) {
        const F32x16 scale = broadcast(1.0f / reduce_add(load(scratch.sum + row * 16)));
        const float* from = scratch.out + static_cast<int64_t>(row) * s.padded_dim;
        float* to = item.out + (item.first + row) * item.q_stride;
        for (int32_t c = 0; c < s.head_dim; c += 16) {
            const F32x16 lanes = load(from + c) * scale;
            if (s.head_dim - c >= 16)
                store(to + c, lanes);
            else
                store_partial(to + c, lanes, s.head_dim - c);
        }
    }
}

inline int64_t blocks_of(int32_t length) { return (length + ENCODER_ROWS - 1) / ENCODER_ROWS; }

ScratchSizes encoder_attention_scratch(const Args& largest, const Step&, int32_t) {
    return {sizeof(float) * place_scratch(encoder_shape(largest), nullptr, nullptr), 0};
}

void encoder_attention(const Args& args, const Step& step, Worker& worker) {
    const EncoderShape s = encoder_shape(args);
    const View &q = args.inputs[EncoderAttention::q], &k = args.inputs[EncoderAttention::k];
    const View& v = args.inputs[EncoderAttention::v];
    EncoderScratch scratch;
    place_scratch(s, static_cast<float*>(worker.scratch), &scratch);
    const DomainRows rows = step.domain(q.domain);
    int64_t total = 0;
    for (int32_t r = 0; r < rows.num_sequences; ++r)
        total += blocks_of(rows.starts[r + 1] - rows.starts[r]) * s.num_heads;
    int64_t begin = 0, end = 0;
    int64_t before = 0;  // items of the texts before `text`
    int32_t text = 0;
    while ((end = worker.take(total, 1, &begin)), begin < total)
        for (int64_t index = begin; index < end; ++index) {
            int32_t token = rows.starts[text], length = rows.starts[text + 1] - token;
            while (index >= before + blocks_of(length) * s.num_heads) {
                before += blocks_of(length) * s.num_heads;
                token = rows.starts[++text];
                length = rows.starts[text + 1] - token;
            }
            const int32_t block = static_cast<int32_t>((index - before) / s.num_heads);
            const int64_t head = (index - before) % s.num_heads, kv_head = head / s.group;
            const int32_t first = block * ENCODER_ROWS;
            const EncoderItem item = {q.data + token * static_cast<int64_t>(q.cols) + head * s.head_dim,
                                      k.data + token * static_cast<int64_t>(k.cols) + kv_head * s.head_dim,
                                      v.data + token * static_cast<int64_t>(v.cols) + kv_head * s.head_dim,
                                      args.output.data + token * static_cast<int64_t>(q.cols) + head * s.head_dim,
                                      q.cols,
                                      k.cols,
                                      first,
                                      length - first < ENCODER_ROWS ? length - first : ENCODER_ROWS,
                                      length,
                                      s.slopes ? s.slopes[head] : 0.0f,
                                      distance_bias_of(s.distance_bias, s.distance_bias_size, s.num_heads, head),
                                      distance_vectors_of(s, head)};
            attend_item(s, item, scratch);
        }
}

// Either both absent, or plain weights with the same odd number of distances for each column.
inline bool are_distance_vectors(const Weight& keys, const Weight& queries, int64_t cols, bool own_keys) {
    if (is_absent(keys) && is_absent(queries)) return true;
    const int64_t size = static_cast<int64_t>((is_absent(keys) ? queries : keys).size);
    return own_keys && size % cols == 0 && size / cols % 2 == 1 && is_vector_or_absent(keys, size) &&
           is_vector_or_absent(queries, size);
}

bool encoder_attention_fits(const Args& args) {
    const int64_t heads = args.ints[EncoderAttention::num_heads], kv_heads = args.ints[EncoderAttention::num_kv_heads];
    const int64_t dim = args.ints[EncoderAttention::head_dim];
    const View &q = args.inputs[EncoderAttention::q], &k = args.inputs[EncoderAttention::k];
    const View& v = args.inputs[EncoderAttention::v];
    return heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && has_cols(q, heads * dim) &&
           has_cols(k, kv_heads * dim) && is_like(v, k) && has_rows_of(k, q) && is_like(q, args.output) &&
           args.ints[EncoderAttention::window] >= 0 &&
           is_vector_or_absent(args.weights[EncoderAttention::alibi_slopes], heads) &&
           is_distance_bias_or_absent(args.weights[EncoderAttention::distance_bias], heads) &&
           are_distance_vectors(args.weights[EncoderAttention::distance_keys],
                                args.weights[EncoderAttention::distance_queries], heads * dim, heads == kv_heads);
}

}  // namespace
OCTAVO_KERNEL_WITH_SCRATCH(encoder_attention, EncoderAttention, encoder_attention_scratch);
}  // namespace octavo
