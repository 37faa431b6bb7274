// Attention of a block of query rows over one split of keys, its two products on AMX tiles.
//
// Tiles multiply bfloat16. To keep the accuracy of float32, a number x is split in two, high = x with a mantissa of
// eight bits and low = x - high, and three products are added: low * high, high * high and high * low. float16 has
// eleven bits, so keys and values are split without loss; queries and probabilities keep about sixteen bits. What is
// left out is below 2^-16 of a product.
//
// Operands have 32 numbers in a row of a tile: numbers j and j + 16 are pair j, so that two vectors of floats become
// pairs by a shift. Each score is one chain of tile products over increasing dimensions, each result one over
// increasing keys of the split, from zero; the maximum is that of the whole split, so nothing is rescaled. Keys that a
// row does not see have probability zero, which changes no bit of its sums: a row is the same in every block.
#pragma once

#include "amx_tiles.h"
#include "attention_block.h"

namespace octavo {
namespace {

constexpr int TILE_BYTES = 16 * 64;
constexpr int STEP = 32;                    // numbers that one tile product adds
constexpr int UNIT_BYTES = 4 * TILE_BYTES;  // two tiles side by side: their high parts, their low parts
constexpr int PIECE_UNITS = 8;              // that are split at once for many rows: they stay in the L1 cache
constexpr int RING_UNITS = 4;               // for few rows
constexpr int AHEAD_UNITS = 2;              // split before they are multiplied, so that no load waits for stores
constexpr int SPLIT_GROUPS = SPLIT / KV_GROUP;

constexpr int32_t steps_of(int32_t numbers) { return (numbers + STEP - 1) / STEP; }

// Bytes from one split row to the next: for each step 32 high parts and 32 low ones.
constexpr int64_t split_row_bytes(int32_t numbers) { return steps_of(numbers) * 128 + 64; }

constexpr int64_t units_bytes(int32_t head_dim) {
    return UNIT_BYTES * (steps_of(head_dim) > PIECE_UNITS ? steps_of(head_dim) : PIECE_UNITS);
}

struct SplitPairs {
    __m512i high, low;
};

// Numbers of which only the upper half has bits that are not zero.
inline __m512i pair_up(__m512i a, __m512i b) { return _mm512_or_si512(_mm512_srli_epi32(a, 16), b); }
inline __m512i upper_half(__m512i a) { return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
inline __m512i bits_of(F32x16 a) { return _mm512_castps_si512(a.v); }
inline F32x16 floats_of(__m512i a) { return {_mm512_castsi512_ps(a)}; }

// Of numbers that are float16, exactly.
inline SplitPairs split_halves(F32x16 a, F32x16 b) {
    const __m512i high_a = upper_half(bits_of(a)), high_b = upper_half(bits_of(b));
    return {pair_up(high_a, high_b), pair_up(bits_of(a - floats_of(high_a)), bits_of(b - floats_of(high_b)))};
}

inline __m512i round_to_upper_half(F32x16 a) {
    return upper_half(_mm512_add_epi32(bits_of(a), _mm512_set1_epi32(0x8000)));
}
inline SplitPairs split_floats(F32x16 a, F32x16 b) {
    const __m512i high_a = round_to_upper_half(a), high_b = round_to_upper_half(b);
    return {pair_up(high_a, high_b),
            pair_up(round_to_upper_half(a - floats_of(high_a)), round_to_upper_half(b - floats_of(high_b)))};
}

// Sixteen rows of a tile from two sequences of float16 vectors, row j from vectors j of both. Those outside `a_rows`
// and `b_rows` are zero. ahead: what is fetched meanwhile, 512 bytes each.
struct TileSource {
    const Half *a, *b;
    int64_t stride;
    Interval a_rows, b_rows;
    const Half *ahead_a, *ahead_b;
};

inline void split_tile(const TileSource& s, char* to) {
    const auto row = [&](int j, F32x16 a, F32x16 b) __attribute__((always_inline)) {
        __builtin_prefetch(j < 8 ? s.ahead_a + j * 32 : s.ahead_b + (j - 8) * 32);
        const SplitPairs pairs = split_halves(a, b);
        _mm512_storeu_si512(to + j * 64, pairs.high);
        _mm512_storeu_si512(to + 2 * TILE_BYTES + j * 64, pairs.low);
    };
    const auto is_whole = [](Interval rows) { return rows.begin <= 0 && rows.end >= 16; };
    if (is_whole(s.a_rows) && is_whole(s.b_rows)) {
        unroll<16>([&](auto i) __attribute__((always_inline)) {
            constexpr int j = decltype(i)::value;
            row(j, load_lanes(s.a + j * s.stride), load_lanes(s.b + j * s.stride));
        });
        return;
    }
    const auto lanes = [&](const Half* from, Interval rows, int j) {
        return j >= rows.begin && j < rows.end ? load_lanes(from + j * s.stride) : broadcast(0.0f);
    };
    for (int j = 0; j < 16; ++j) row(j, lanes(s.a, s.a_rows, j), lanes(s.b, s.b_rows, j));
}

// Adds the product of one step to R tiles of rows by two of columns, tiles 0 to 3. rows: the step in the first row.
template <int R>
inline void multiply_unit(const char* rows, int64_t stride, const char* unit) {
    const char* const second = rows + 16 * stride;
    tile_load<6>(unit, 64);
    tile_load<7>(unit + TILE_BYTES, 64);
    const auto multiply = [&](int64_t part) __attribute__((always_inline)) {
        tile_load<4>(rows + part, stride);
        tile_dot_bf16<0, 4, 6>();
        tile_dot_bf16<1, 4, 7>();
        if constexpr (R == 2) {
            tile_load<5>(second + part, stride);
            tile_dot_bf16<2, 5, 6>();
            tile_dot_bf16<3, 5, 7>();
        }
    };
    multiply(64);
    multiply(0);
    tile_load<6>(unit + 2 * TILE_BYTES, 64);
    tile_load<7>(unit + 3 * TILE_BYTES, 64);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (R == 2) tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<1, 4, 7>();
    if constexpr (R == 2) tile_dot_bf16<3, 5, 7>();
}

template <int R>
inline void zero_sums() {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (R == 2) {
        tile_zero<2>();
        tile_zero<3>();
    }
}
template <int R>
inline void store_sums(float* to, int64_t stride, bool both_columns) {
    const size_t bytes = sizeof(float) * stride;
    tile_store<0>(to, bytes);
    if (both_columns) tile_store<1>(to + 16, bytes);
    if constexpr (R == 2) {
        tile_store<2>(to + 16 * stride, bytes);
        if (both_columns) tile_store<3>(to + 16 * stride + 16, bytes);
    }
}

// The keys of one split that the block sees, and where they and their values lie.
struct SplitKeys {
    int32_t start;  // position of its first key
    Interval keys;  // relative to start
    const Half* key_groups[SPLIT_GROUPS];
    const Half* value_groups[SPLIT_GROUPS];
    const Half* next_groups[SPLIT_GROUPS];  // keys of the next split

    Interval steps() const { return {keys.begin / STEP, steps_of(keys.end)}; }
    // Those of a group, relative to its first.
    Interval of_group(int g) const { return intersect({keys.begin - g * KV_GROUP, keys.end - g * KV_GROUP}, 0, 16); }
};

inline SplitKeys find_split(const AttentionShape& shape, const HeadCache& cache, const QueryBlock& block,
                            int32_t split) {
    SplitKeys found;
    const Interval seen = visible_keys(shape, block, 0, block.rows - 1);
    found.start = split * SPLIT;
    found.keys = intersect({seen.begin - found.start, seen.end - found.start}, 0, SPLIT);
    for (int g = found.keys.begin / KV_GROUP; g * KV_GROUP < found.keys.end; ++g) {
        char* buffer = block.gathered + g * gathered_group_bytes(HalfCache::type, cache.dims);
        const int32_t group = found.start / KV_GROUP + g;
        const KeyGroup<HalfCache> at = find_group<HalfCache>(cache, block.block_table, group, block.seq_len, buffer);
        found.key_groups[g] = at.keys;
        found.value_groups[g] = at.values;
        found.next_groups[g] = keys_ahead<HalfCache>(cache, block, group + SPLIT_GROUPS, at.keys);
    }
    return found;
}

// Keys of a split that rows [first, last] see, the union, relative to its first key.
inline Interval seen_of_split(const AttentionShape& shape, const QueryBlock& block, int32_t start, int32_t first,
                              int32_t last) {
    const Interval seen = visible_keys(shape, block, first, last);
    return intersect({seen.begin - start, seen.end - start}, 0, SPLIT);
}

// Dimensions [32 step, 32 step + 32) of the keys [32 pair, 32 pair + 32) of the split.
inline void split_keys(const AttentionShape& shape, const SplitKeys& split, int pair, int step, char* to) {
    const int32_t first = step * STEP, rest = shape.head_dim - first;
    for (int g = 2 * pair; g < 2 * pair + 2; ++g, to += TILE_BYTES) {
        if (split.of_group(g).empty()) continue;  // whatever its scores: nobody sees them
        const Half* const from = split.key_groups[g] + first * KV_GROUP;
        const Half* const ahead = split.value_groups[g] + first * KV_GROUP;
        split_tile({from, from + 16 * KV_GROUP, KV_GROUP, {0, rest}, {0, rest - 16}, ahead, ahead + 16 * KV_GROUP}, to);
    }
}

// Columns [column, column + 32) of the values of keys [32 step, 32 step + 32) of the split; zeros for unseen keys:
// what lies there may be no number.
inline void split_values(const AttentionShape& shape, const SplitKeys& split, int32_t column, int step, char* to) {
    const Half *from[2], *ahead[2];
    Interval rows[2];
    for (int i = 0; i < 2; ++i) {
        const int g = 2 * step + i;
        rows[i] = split.of_group(g);
        from[i] = rows[i].empty() ? nullptr : split.value_groups[g] + column;
        ahead[i] = rows[i].empty() ? nullptr : split.next_groups[g] + column * KV_GROUP;
    }
    for (int32_t c = column; c < shape.padded_dim && c < column + STEP; c += 16, to += TILE_BYTES) {
        split_tile({from[0], from[1], shape.padded_dim, rows[0], rows[1], ahead[0], ahead[1]}, to);
        for (int i = 0; i < 2; ++i) {
            if (rows[i].empty()) continue;
            from[i] += 16;
            ahead[i] += 16 * KV_GROUP;
        }
    }
}

// Both products of few rows, at most two tiles: sums over `steps` units for each of `count` results, one after the
// other. split(result, step, to) makes a unit; rows: the first step in the first row; store(result) what is summed.
template <int R, typename Split, typename Store>
inline void multiply_few(const char* rows, int64_t stride, int count, int steps, char* units, const Split& split,
                         const Store& store) {
    int next = 0, next_result = 0, next_step = 0;
    const int total = count * steps;
    const auto split_next = [&] {
        split(next_result, next_step, units + next % RING_UNITS * UNIT_BYTES);
        ++next;
        if (++next_step == steps) next_step = 0, ++next_result;
    };
    while (next < total && next < AHEAD_UNITS) split_next();
    for (int result = 0, unit = 0; result < count; ++result) {
        zero_sums<R>();
        for (int step = 0; step < steps; ++step, ++unit) {
            if (next < total) split_next();
            multiply_unit<R>(rows + step * 128, stride, units + unit % RING_UNITS * UNIT_BYTES);
        }
        store(result);
    }
}

// Calls f(number of tiles, first row) for pairs of row tiles, the last one perhaps alone.
template <typename F>
inline void each_row_pair(int32_t rows, const F& f) {
    int32_t row = 0;
    for (; row + 16 < rows; row += 32) f(Int<2>{}, row);
    if (row < rows) f(Int<1>{}, row);
}

inline void score_split(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split) {
    const int64_t stride = split_row_bytes(shape.head_dim);
    const int steps = steps_of(shape.head_dim);
    const Interval pairs = split.steps();
    if (block.rows <= 32) {
        each_row_pair(block.rows, [&](auto tiles, int32_t) {
            constexpr int R = decltype(tiles)::value;
            multiply_few<R>(
                block.tile_q, stride, pairs.end - pairs.begin, steps, block.units,
                [&](int i, int step, char* to) { split_keys(shape, split, pairs.begin + i, step, to); },
                [&](int i) { store_sums<R>(block.scores + (pairs.begin + i) * STEP, SCORES_OF_ROW, true); });
        });
        return;
    }
    const int width = steps < PIECE_UNITS ? PIECE_UNITS / steps : 1;
    for (int piece = pairs.begin; piece < pairs.end; piece += width) {
        const int end = piece + width < pairs.end ? piece + width : pairs.end;
        for (int pair = piece; pair < end; ++pair)
            for (int step = 0; step < steps; ++step)
                split_keys(shape, split, pair, step, block.units + ((pair - piece) * steps + step) * UNIT_BYTES);
        each_row_pair(block.rows, [&](auto tiles, int32_t row) {
            constexpr int R = decltype(tiles)::value;
            const int32_t last = row + 16 * R < block.rows ? row + 16 * R - 1 : block.rows - 1;
            const Interval seen = seen_of_split(shape, block, split.start, row, last);
            for (int pair = piece; pair < end; ++pair) {
                if (intersect(seen, pair * STEP, (pair + 1) * STEP).empty()) continue;
                zero_sums<R>();
                for (int step = 0; step < steps; ++step)
                    multiply_unit<R>(block.tile_q + row * stride + step * 128, stride,
                                     block.units + ((pair - piece) * steps + step) * UNIT_BYTES);
                store_sums<R>(block.scores + static_cast<int64_t>(row) * SCORES_OF_ROW + pair * STEP, SCORES_OF_ROW,
                              true);
            }
        });
    }
}

// e^x for x that are not positive, as `exp` but with fewer instructions: below -87 as for -87, NaN stays NaN.
inline F32x16 exp_of_difference(F32x16 x) {
    const F32x16 whole = broadcast(12582912.0f);  // 1.5 * 2^23: the lowest bits of a sum with it are an integer
    x = max(broadcast(-87.0f), x);
    const F32x16 shifted = fma(x, broadcast(1.44269504088896341f), whole), n = shifted - whole;
    F32x16 r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    F32x16 p = broadcast(1.0f / 720);
    p = fma(p, r, broadcast(1.0f / 120));
    p = fma(p, r, broadcast(1.0f / 24));
    p = fma(p, r, broadcast(1.0f / 6));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return floats_of(_mm512_add_epi32(bits_of(p), _mm512_slli_epi32(bits_of(shifted), 23)));
}

// Scores of the steps become split probabilities in the same place; returns their sums, lane by lane.
inline F32x16 exponentiate_split(float* scores, Interval steps, Interval keys, float max_score) {
    const F32x16 largest = broadcast(max_score);
    F32x16 sum[2] = {broadcast(0.0f), broadcast(0.0f)};
    for (int step = steps.begin; step < steps.end; ++step) {
        float* const at = scores + step * STEP;
        F32x16 p[2] = {exp_of_difference(load(at) - largest), exp_of_difference(load(at + 16) - largest)};
        const Interval own = {keys.begin - step * STEP, keys.end - step * STEP};
        if (own.begin > 0 || own.end < STEP)
            for (int i = 0; i < 2; ++i) p[i] = keep_lanes(p[i], own.begin - 16 * i, own.end - 16 * i, 0.0f);
        for (int i = 0; i < 2; ++i) sum[i] = sum[i] + p[i];
        const SplitPairs pairs = split_floats(p[0], p[1]);
        _mm512_storeu_si512(at, pairs.high);
        _mm512_storeu_si512(at + 16, pairs.low);
    }
    return sum[0] + sum[1];
}

// Rows [first, last], whose keys are one union for the product with values.
inline void softmax_split(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split, int32_t first,
                          int32_t last) {
    const Interval seen = seen_of_split(shape, block, split.start, first, last);
    const Interval steps = {seen.begin / STEP, steps_of(seen.end)};
    for (int32_t row = first; row <= last; ++row) {
        const int32_t head = block.kv_head * shape.group + row % shape.group;
        const int32_t position = block.first_position + row / shape.group;
        const Interval keys = seen_of_split(shape, block, split.start, row, row);
        block.split_max[row] = largest_score(
            {block.scores + static_cast<int64_t>(row) * SCORES_OF_ROW,
             keys.begin,
             keys.end,
             {shape.softcap, shape.slopes ? shape.slopes[head] : 0.0f, static_cast<float>(split.start - position)}});
    }
    for (int32_t row = first; row <= last; ++row) {
        const Interval keys = seen_of_split(shape, block, split.start, row, row);
        store(block.split_sum + row * 16, exponentiate_split(block.scores + static_cast<int64_t>(row) * SCORES_OF_ROW,
                                                             steps, keys, block.split_max[row]));
    }
}

inline void add_split_values(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split) {
    constexpr int64_t stride = SCORES_OF_ROW * sizeof(float);
    const Interval all = split.steps();
    const char* const probabilities = reinterpret_cast<const char*>(block.scores);
    const auto has_two = [&](int32_t column) { return column + 16 < shape.padded_dim; };
    if (block.rows <= 32) {
        each_row_pair(block.rows, [&](auto tiles, int32_t) {
            constexpr int R = decltype(tiles)::value;
            multiply_few<R>(
                probabilities + all.begin * 128, stride, steps_of(shape.padded_dim), all.end - all.begin, block.units,
                [&](int i, int step, char* to) { split_values(shape, split, i * STEP, all.begin + step, to); },
                [&](int i) { store_sums<R>(block.split_out + i * STEP, shape.padded_dim, has_two(i * STEP)); });
        });
        return;
    }
    for (int32_t column = 0; column < shape.padded_dim; column += STEP) {
        for (int step = all.begin; step < all.end; ++step)
            split_values(shape, split, column, step, block.units + step * UNIT_BYTES);
        each_row_pair(block.rows, [&](auto tiles, int32_t row) {
            constexpr int R = decltype(tiles)::value;
            const int32_t last = row + 16 * R < block.rows ? row + 16 * R - 1 : block.rows - 1;
            const Interval seen = seen_of_split(shape, block, split.start, row, last);
            zero_sums<R>();
            for (int step = seen.begin / STEP; step < steps_of(seen.end); ++step)
                multiply_unit<R>(probabilities + row * stride + step * 128, stride, block.units + step * UNIT_BYTES);
            store_sums<R>(block.split_out + static_cast<int64_t>(row) * shape.padded_dim + column, shape.padded_dim,
                          has_two(column));
        });
    }
}

// The block's attention over the keys of one split, as attend_split.
inline void attend_split_tiles(const AttentionShape& shape, const HeadCache& cache, const QueryBlock& block,
                               int32_t index) {
    const SplitKeys split = find_split(shape, cache, block, index);
    score_split(shape, block, split);
    each_row_pair(block.rows, [&](auto tiles, int32_t row) {
        const int32_t end = row + 16 * decltype(tiles)::value;
        softmax_split(shape, block, split, row, end < block.rows ? end - 1 : block.rows - 1);
    });
    add_split_values(shape, block, split);
}

// Splits the loaded queries of a block.
inline void split_queries(const AttentionShape& shape, const QueryBlock& block) {
    const int32_t n = shape.head_dim;
    const auto lanes = [&](const float* from, int32_t i) {
        return i + 16 <= n ? load(from + i) : i < n ? load_partial(from + i, n - i) : broadcast(0.0f);
    };
    for (int32_t row = 0; row < block.rows; ++row) {
        const float* const from = block.q + static_cast<int64_t>(row) * n;
        char* to = block.tile_q + row * split_row_bytes(n);
        for (int32_t i = 0; i < n; i += STEP, to += 128) {
            const SplitPairs pairs = split_floats(lanes(from, i), lanes(from, i + 16));
            _mm512_storeu_si512(to, pairs.high);
            _mm512_storeu_si512(to + 64, pairs.low);
        }
    }
}

// Tiles have the rows of the block if all blocks of the step have one or two tiles of them.
inline void configure_row_tiles(int32_t rows) {
    const int32_t rest = rows - 16;
    configure_tiles({rest < 0 ? rows : 16, rest <= 0 || rest > 16 ? 16 : rest});
}

}  // namespace
}  // namespace octavo
