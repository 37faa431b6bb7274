// The operands of attention's tile products (attention_amx.h): numbers split into two bfloat16, units of keys and of
// values, and the instructions that multiply a unit.
#pragma once

#include "amx_tiles.h"
#include "attention_block.h"
#include "unroll.h"

namespace octavo {
namespace {

constexpr int TILE_BYTES = 16 * 64;
constexpr int STEP = 32;                    // numbers added by one tile product
constexpr int UNIT_BYTES = 4 * TILE_BYTES;  // two adjacent tiles: the high parts, then the low parts
constexpr int RING_UNITS = 4;               // for few rows
constexpr int AHEAD_UNITS = 2;              // units split ahead of the multiplication, so that no load waits for stores
constexpr int SPLIT_GROUPS = SPLIT / KV_GROUP;
constexpr int SPLIT_STEPS = SPLIT / STEP;

constexpr int32_t steps_of(int32_t numbers) { return (numbers + STEP - 1) / STEP; }

// The distance between split rows in bytes: each step has 32 high parts and 32 low ones.
constexpr int64_t split_row_bytes(int32_t numbers) { return steps_of(numbers) * 128 + 64; }

// Bytes for all keys and all values of a split.
constexpr int64_t units_bytes(int32_t head_dim, int32_t value_dim) {
    return SPLIT_STEPS * UNIT_BYTES * (steps_of(head_dim) + steps_of(value_dim));
}

struct SplitPairs {
    __m512i high, low;
};

// Both arguments have nonzero bits only in the upper half of each number.
inline __m512i pair_up(__m512i a, __m512i b) { return _mm512_or_si512(_mm512_srli_epi32(a, 16), b); }
inline __m512i upper_half(__m512i a) { return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
inline __m512i bits_of(F32x16 a) { return _mm512_castps_si512(a.v); }
inline F32x16 floats_of(__m512i a) { return {_mm512_castsi512_ps(a)}; }

// Splits numbers that are exactly float16.
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

// Cache lines, `stride` elements apart.
struct Lines {
    const Half* first;
    int64_t stride;
};

// Source of a tile: 16 rows from two sequences of float16 vectors, where row j takes vector j of both. Rows outside
// `a_rows` and `b_rows` are zero. ahead: cache lines to fetch meanwhile, one per row.
struct TileSource {
    const Half *a, *b;
    int64_t stride;
    Interval a_rows, b_rows;
    Lines ahead;
};

// Calls between(Int<j>) after row j.
template <typename Between>
__attribute__((always_inline)) inline void split_tile(const TileSource& source, char* to, const Between& between) {
    const auto is_whole = [](Interval rows) { return rows.begin <= 0 && rows.end >= 16; };
    // Local copies, so the compiler knows that the stores do not change them.
    const Half *a = source.a, *b = source.b, *ahead = source.ahead.first;
    const int64_t stride = source.stride, ahead_stride = source.ahead.stride;
    const auto row = [&](int j, F32x16 lanes_a, F32x16 lanes_b) __attribute__((always_inline)) {
        __builtin_prefetch(ahead);
        const SplitPairs pairs = split_halves(lanes_a, lanes_b);
        _mm512_storeu_si512(to + j * 64, pairs.high);
        _mm512_storeu_si512(to + 2 * TILE_BYTES + j * 64, pairs.low);
        a += stride;
        b += stride;
        ahead += ahead_stride;
    };
    if (is_whole(source.a_rows) && is_whole(source.b_rows)) {
        unroll<16>([&](auto j) __attribute__((always_inline)) {
            row(j.value, load_lanes(a), load_lanes(b));
            between(j);
        });
        return;
    }
    const auto lanes = [](const Half* from, Interval rows, int j) {
        return j >= rows.begin && j < rows.end ? load_lanes(from) : broadcast(0.0f);
    };
    for (int j = 0; j < 16; ++j) row(j, lanes(a, source.a_rows, j), lanes(b, source.b_rows, j));
    unroll<16>(between);
}

// The operands of one step's product: the step in the first row, the distance between rows in bytes, and a unit.
struct StepOperands {
    const char* rows;
    int64_t stride;
    const char* unit;
};

// Issues instruction `i` of the UNIT_OPERATIONS that add the product of a step to R x 2 tiles, tiles 0 to 3.
constexpr int UNIT_OPERATIONS = 20, UNIT_SLOTS = 4;
template <int R, int i>
__attribute__((always_inline)) inline void unit_operation(const StepOperands& s) {
    if constexpr (i == 0) tile_load<6>(s.unit, 64);
    if constexpr (i == 1) tile_load<7>(s.unit + TILE_BYTES, 64);
    if constexpr (i == 2) tile_load<4>(s.rows + 64, s.stride);
    if constexpr (i == 8) tile_load<4>(s.rows, s.stride);
    if constexpr (i == 14) tile_load<6>(s.unit + 2 * TILE_BYTES, 64);
    if constexpr (i == 17) tile_load<7>(s.unit + 3 * TILE_BYTES, 64);
    if constexpr (i == 3 || i == 9 || i == 15) tile_dot_bf16<0, 4, 6>();
    if constexpr (i == 4 || i == 10 || i == 18) tile_dot_bf16<1, 4, 7>();
    if constexpr (R == 2) {
        if constexpr (i == 5) tile_load<5>(s.rows + 16 * s.stride + 64, s.stride);
        if constexpr (i == 11) tile_load<5>(s.rows + 16 * s.stride, s.stride);
        if constexpr (i == 6 || i == 12 || i == 16) tile_dot_bf16<2, 5, 6>();
        if constexpr (i == 7 || i == 13 || i == 19) tile_dot_bf16<3, 5, 7>();
        if constexpr (i == 7 || i == 19) tiles_unused<5>();
    }
    if constexpr (i == 4 || i == 18) tiles_unused<4>();
    if constexpr (i == (R == 2 ? 12 : 9) || i == (R == 2 ? 16 : 15)) tiles_unused<6>();
    if constexpr (i == (R == 2 ? 13 : 10) || i == (R == 2 ? 19 : 18)) tiles_unused<7>();
}

// Issues all of them, and calls between() UNIT_SLOTS times.
template <int R, typename Between>
inline void multiply_unit(const StepOperands& s, const Between& between) {
    unroll<UNIT_OPERATIONS>([&](auto i) __attribute__((always_inline)) {
        unit_operation<R, i.value>(s);
        if constexpr (i.value % (UNIT_OPERATIONS / UNIT_SLOTS) == UNIT_OPERATIONS / UNIT_SLOTS - 1) between();
    });
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

// The keys of one split that the block sees, and the addresses of the keys and their values.
struct SplitKeys {
    int32_t start;  // position of its first key
    Interval keys;  // relative to start
    const Half* key_groups[SPLIT_GROUPS];
    const Half* value_groups[SPLIT_GROUPS];
    const Half* next_groups[SPLIT_GROUPS];  // keys of the next split

    Interval steps() const { return {keys.begin / STEP, steps_of(keys.end)}; }
    // The visible keys of a group, relative to its first key.
    Interval of_group(int g) const { return intersect({keys.begin - g * KV_GROUP, keys.end - g * KV_GROUP}, 0, 16); }
    Interval groups() const { return {keys.begin / KV_GROUP, (keys.end + KV_GROUP - 1) / KV_GROUP}; }
};

constexpr int FETCHED_UNITS = 4;  // memory latency, in units: each unit is fetched this long before it is split

// What is needed FETCHED_UNITS after the values of a group: the values of a later group, of the next columns, or the
// next split's keys.
inline Lines after_values(const AttentionShape& shape, const SplitKeys& split, int32_t column, int g) {
    const Interval groups = split.groups();
    int later = g + 2 * FETCHED_UNITS;
    if (later >= groups.end) {
        later -= groups.end - groups.begin;
        if (later < groups.begin || later >= groups.end) later = g;
        column += STEP;
    }
    if (column < shape.padded_dim) return {split.value_groups[later] + column, shape.padded_dim};
    return {split.next_groups[later], STEP};
}

// As above, for the dimensions from `first` on of the keys of a group; the last keys are followed by the values.
inline Lines after_keys(const AttentionShape& shape, const SplitKeys& split, int32_t first, int g) {
    const int steps = steps_of(shape.head_dim), pairs = steps < FETCHED_UNITS ? FETCHED_UNITS / steps : 1;
    const Interval groups = split.groups();
    const int later = g + 2 * pairs;
    if (later < groups.end) return {split.key_groups[later] + first * KV_GROUP, STEP};
    return after_values(shape, split, first < shape.padded_dim ? first : 0, g);
}

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

// The union of a split's keys that rows [first, last] see, relative to its first key.
inline Interval seen_of_split(const AttentionShape& shape, const QueryBlock& block, int32_t start, int32_t first,
                              int32_t last) {
    const Interval seen = visible_keys(shape, block, first, last);
    return intersect({seen.begin - start, seen.end - start}, 0, SPLIT);
}

// Both tiles of a unit take turns: between(Int<j>) for j below 32.
constexpr int UNIT_ROWS = 32;
template <int tile, typename Between>
__attribute__((always_inline)) inline void split_unit_tile(bool used, const TileSource& source, char* to,
                                                           const Between& between) {
    const auto of_unit = [&](auto j) __attribute__((always_inline)) { between(Int<16 * tile + decltype(j)::value>{}); };
    if (used)
        split_tile(source, to + tile * TILE_BYTES, of_unit);
    else
        unroll<16>(of_unit);
}

// Splits dimensions [32 step, 32 step + 32) of the keys [32 pair, 32 pair + 32) of the split. Groups that no row sees
// are not written, so their scores are arbitrary.
template <typename Between>
inline void split_keys(const AttentionShape& shape, const SplitKeys& split, int pair, int step, char* to,
                       const Between& between) {
    const int32_t first = step * STEP, rest = shape.head_dim - first;
    unroll<2>([&](auto i) __attribute__((always_inline)) {
        const int g = 2 * pair + i.value;
        TileSource source{};
        const bool used = !split.of_group(g).empty();
        if (used) {
            const Half* const from = split.key_groups[g] + first * KV_GROUP;
            source = {from,      from + 16 * KV_GROUP, KV_GROUP,
                      {0, rest}, {0, rest - 16},       after_keys(shape, split, first, g)};
        }
        split_unit_tile<i.value>(used, source, to, between);
    });
}

// Splits columns [column, column + 32) of the values of keys [32 step, 32 step + 32) of the split. Unseen keys give
// zeros, since their memory may hold NaN.
template <typename Between>
inline void split_values(const AttentionShape& shape, const SplitKeys& split, int32_t column, int step, char* to,
                         const Between& between) {
    const Half* from[2] = {};
    Lines ahead[2] = {};
    Interval rows[2];
    for (int i = 0; i < 2; ++i) {
        const int g = 2 * step + i;
        rows[i] = split.of_group(g);
        if (rows[i].empty()) continue;
        from[i] = split.value_groups[g] + column;
        ahead[i] = after_values(shape, split, column, g);
    }
    unroll<2>([&](auto i) __attribute__((always_inline)) {
        const int32_t c = 16 * i.value;
        const auto at = [c](const Half* p) { return p ? p + c : p; };
        split_unit_tile<i.value>(column + c < shape.padded_dim,
                                 {at(from[0]), at(from[1]), shape.padded_dim, rows[0], rows[1], ahead[i.value]}, to,
                                 between);
    });
}
constexpr auto NOTHING_BETWEEN = [](auto...) {};

}  // namespace
}  // namespace octavo
