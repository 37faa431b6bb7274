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
constexpr int RING_UNITS = 4;               // for few rows
constexpr int AHEAD_UNITS = 2;              // split before they are multiplied, so that no load waits for stores
constexpr int SPLIT_GROUPS = SPLIT / KV_GROUP;
constexpr int SPLIT_STEPS = SPLIT / STEP;

constexpr int32_t steps_of(int32_t numbers) { return (numbers + STEP - 1) / STEP; }

// Bytes from one split row to the next: for each step 32 high parts and 32 low ones.
constexpr int64_t split_row_bytes(int32_t numbers) { return steps_of(numbers) * 128 + 64; }

// All keys and all values of a split.
constexpr int64_t units_bytes(int32_t head_dim, int32_t value_dim) {
    return SPLIT_STEPS * UNIT_BYTES * (steps_of(head_dim) + steps_of(value_dim));
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

// Cache lines so many elements apart.
struct Lines {
    const Half* first;
    int64_t stride;
};

// Sixteen rows of a tile from two sequences of float16 vectors, row j from vectors j of both. Those outside `a_rows`
// and `b_rows` are zero. ahead: what is fetched meanwhile, as many cache lines.
struct TileSource {
    const Half *a, *b;
    int64_t stride;
    Interval a_rows, b_rows;
    Lines ahead;
};

// between(Int<j>) comes after row j.
template <typename Between>
__attribute__((always_inline)) inline void split_tile(const TileSource& source, char* to, const Between& between) {
    const TileSource s = source;  // not what the stores may have changed
    const auto row = [&](int j, F32x16 a, F32x16 b) __attribute__((always_inline)) {
        __builtin_prefetch(s.ahead.first + j * s.ahead.stride);
        const SplitPairs pairs = split_halves(a, b);
        _mm512_storeu_si512(to + j * 64, pairs.high);
        _mm512_storeu_si512(to + 2 * TILE_BYTES + j * 64, pairs.low);
    };
    const auto is_whole = [](Interval rows) { return rows.begin <= 0 && rows.end >= 16; };
    if (is_whole(s.a_rows) && is_whole(s.b_rows)) {
        unroll<16>([&](auto j) __attribute__((always_inline)) {
            row(j.value, load_lanes(s.a + j.value * s.stride), load_lanes(s.b + j.value * s.stride));
            between(j);
        });
        return;
    }
    const auto lanes = [&](const Half* from, Interval rows, int j) {
        return j >= rows.begin && j < rows.end ? load_lanes(from + j * s.stride) : broadcast(0.0f);
    };
    for (int j = 0; j < 16; ++j) row(j, lanes(s.a, s.a_rows, j), lanes(s.b, s.b_rows, j));
    unroll<16>(between);
}

// The operands of a product of one step: the step in the first row, bytes from row to row, and a unit.
struct StepOperands {
    const char* rows;
    int64_t stride;
    const char* unit;
};

// Instruction `i` of UNIT_OPERATIONS that add the product of a step to R tiles of rows by two of columns, tiles 0 to 3.
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
    }
}

// All of them; between() comes UNIT_SLOTS times.
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
    Interval groups() const { return {keys.begin / KV_GROUP, (keys.end + KV_GROUP - 1) / KV_GROUP}; }
};

constexpr int FETCHED_UNITS = 4;  // how long before it is split a unit is fetched: memory takes that long

// What is used FETCHED_UNITS after the values of a group: values of a later group, or of the next columns, or the next
// split's keys.
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

// The same for the dimensions from `first` on of the keys of a group; after the last keys come the values.
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

// Keys of a split that rows [first, last] see, the union, relative to its first key.
inline Interval seen_of_split(const AttentionShape& shape, const QueryBlock& block, int32_t start, int32_t first,
                              int32_t last) {
    const Interval seen = visible_keys(shape, block, first, last);
    return intersect({seen.begin - start, seen.end - start}, 0, SPLIT);
}

// Both tiles of a unit take part in turn: between(Int<j>) for j up to 32.
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

// Dimensions [32 step, 32 step + 32) of the keys [32 pair, 32 pair + 32) of the split. Groups that nobody sees keep
// whatever is there: so do their scores.
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

// Columns [column, column + 32) of the values of keys [32 step, 32 step + 32) of the split; zeros for unseen keys:
// what lies there may be no number.
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

// e^x for x that are not positive, with fewer instructions than `exp`: a polynomial of degree 5 with a relative error
// below 2e-7, exactly 1 for 0. Below -87 as for -87, NaN stays NaN.
inline F32x16 exp_of_difference(F32x16 x) {
    const F32x16 whole = broadcast(12582912.0f);  // 1.5 * 2^23: the lowest bits of a sum with it are an integer
    x = max(broadcast(-87.0f), x);
    const F32x16 shifted = fma(x, broadcast(1.44269504088896341f), whole), n = shifted - whole;
    const F32x16 r = fma(n, broadcast(-0.69314718056f), x);
    F32x16 p = broadcast(0.008290272122f);
    p = fma(p, r, broadcast(0.04189816037f));
    p = fma(p, r, broadcast(0.1666763813f));
    p = fma(p, r, broadcast(0.4999914784f));
    p = fma(p, r, broadcast(0.9999997063f));
    p = fma(p, r, broadcast(1.0f));
    return floats_of(_mm512_add_epi32(bits_of(p), _mm512_slli_epi32(bits_of(shifted), 23)));
}

// Scores of some rows become split probabilities in the same place, one step of one row at a time, so that tiles can be
// multiplied meanwhile. The rows' keys are one union for the product with values: those that a row does not see become
// zero.
class RowsSoftmax {
  public:
    // scores: of the first row.
    RowsSoftmax(const AttentionShape& shape, const QueryBlock& block, int32_t start, int32_t first, int32_t count,
                float* scores)
        : shape_(shape), block_(block), start_(start), row_(first), end_(first + count), scores_(scores) {
        const Interval seen = seen_of_split(shape, block, start, first, first + count - 1);
        steps_ = {seen.begin / STEP, steps_of(seen.end)};
        if (count == 0) return;
        if (!steps_.empty()) {
            look_ahead(row_, scores_);
            begin_row();
            return;
        }
        for (; row_ < end_; ++row_) {
            block_.split_max[row_] = NO_SCORE;
            store(block_.split_sum + row_ * 16, broadcast(0.0f));
        }
    }

    int remaining() const { return (end_ - row_) * (steps_.end - steps_.begin); }

    __attribute__((noinline)) void advance() {
        if (row_ == end_) return;
        float* const at = scores_ + step_ * STEP;
        const F32x16 largest = broadcast(max_);
        F32x16 p[2] = {exp_of_difference(load(at) - largest), exp_of_difference(load(at + 16) - largest)};
        hide(p, keys_, step_, 0.0f);
        for (int i = 0; i < 2; ++i) sum_[i] = sum_[i] + p[i];
        const SplitPairs pairs = split_floats(p[0], p[1]);
        _mm512_storeu_si512(at, pairs.high);
        _mm512_storeu_si512(at + 16, pairs.low);
        if (++step_ == steps_.end) finish_row();
    }
    void finish() {
        while (row_ < end_) advance();
    }

  private:
    // Replaces what lies outside of `keys` in a step.
    static void hide(F32x16 (&lanes)[2], Interval keys, int step, float replacement) {
        const int begin = keys.begin - step * STEP, end = keys.end - step * STEP;
        if (begin <= 0 && end >= STEP) return;
        for (int i = 0; i < 2; ++i) lanes[i] = keep_lanes(lanes[i], begin - 16 * i, end - 16 * i, replacement);
    }

    float largest(const float* scores, Interval keys) const {
        F32x16 highest[2] = {broadcast(NO_SCORE), broadcast(NO_SCORE)};
        for (int step = keys.begin / STEP; step < steps_of(keys.end); ++step) {
            F32x16 lanes[2] = {load(scores + step * STEP), load(scores + step * STEP + 16)};
            hide(lanes, keys, step, NO_SCORE);
            for (int i = 0; i < 2; ++i) highest[i] = max(highest[i], lanes[i]);
        }
        return reduce_max(max(highest[0], highest[1]));
    }

    // A row's maximum is found while the row before it is computed.
    void look_ahead(int32_t row, float* scores) {
        next_keys_ = seen_of_split(shape_, block_, start_, row, row);
        if (shape_.softcap == 0.0f && !shape_.slopes) {
            next_max_ = largest(scores, next_keys_);
            return;
        }
        const int32_t head = block_.kv_head * shape_.group + row % shape_.group;
        const int32_t position = block_.first_position + row / shape_.group;
        next_max_ = largest_score(
            {scores,
             next_keys_.begin,
             next_keys_.end,
             {shape_.softcap, shape_.slopes ? shape_.slopes[head] : 0.0f, static_cast<float>(start_ - position)}});
    }
    __attribute__((noinline)) void begin_row() {
        block_.split_max[row_] = max_ = next_max_;
        keys_ = next_keys_;
        step_ = steps_.begin;
        sum_[0] = sum_[1] = broadcast(0.0f);
        if (row_ + 1 < end_) look_ahead(row_ + 1, scores_ + SCORES_OF_ROW);
    }
    void finish_row() {
        store(block_.split_sum + row_ * 16, sum_[0] + sum_[1]);
        scores_ += SCORES_OF_ROW;
        if (++row_ < end_) begin_row();
    }

    const AttentionShape& shape_;
    const QueryBlock& block_;
    const int32_t start_;
    int32_t row_, end_;
    float* scores_;  // of the row
    Interval steps_, keys_, next_keys_;
    int step_ = 0;
    float max_ = 0.0f, next_max_ = 0.0f;
    F32x16 sum_[2];
};

constexpr int64_t SCORE_BYTES = SCORES_OF_ROW * sizeof(float);

// Both halves of an output column pair exist.
inline bool has_two_tiles(const AttentionShape& shape, int pair) { return pair * STEP + 16 < shape.padded_dim; }

// A block of at most 32 rows, R tiles: each unit of keys or values is split while another is multiplied, since the one
// waits for vectors and the other for tiles.
template <int R>
class FewRows {
  public:
    FewRows(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split)
        : shape_(shape),
          block_(block),
          split_(split),
          first_(split.steps().begin),
          key_steps_(split.steps().end - first_),
          dim_steps_(steps_of(shape.head_dim)),
          column_pairs_(steps_of(shape.padded_dim)),
          end_(key_steps_ * (dim_steps_ + column_pairs_)) {}

    __attribute__((noinline)) void attend() {
        while (next_ < AHEAD_UNITS && next_ < end_) split_next<true>(NOTHING_BETWEEN);
        multiply<true>(block_.tile_q, split_row_bytes(shape_.head_dim), key_steps_, dim_steps_,
                       [&](int i) { store_sums<R>(block_.scores + (first_ + i) * STEP, SCORES_OF_ROW, true); });
        RowsSoftmax(shape_, block_, split_.start, 0, block_.rows, block_.scores).finish();
        multiply<false>(
            reinterpret_cast<const char*>(block_.scores + first_ * STEP), SCORE_BYTES, column_pairs_, key_steps_,
            [&](int i) { store_sums<R>(block_.split_out + i * STEP, shape_.padded_dim, has_two_tiles(shape_, i)); });
    }

  private:
    char* unit(int i) const { return block_.units + i % RING_UNITS * UNIT_BYTES; }

    // The next of all units, those of the keys before those of the values.
    template <bool may_be_keys, typename Between>
    __attribute__((always_inline)) void split_next(const Between& between) {
        char* const to = unit(next_);
        const int keys_end = key_steps_ * dim_steps_;
        if (may_be_keys && next_ < keys_end) {
            split_keys(shape_, split_, first_ + result_, step_, to, between);
            if (++step_ == dim_steps_) step_ = 0, ++result_;
        } else {
            if (next_ == keys_end) step_ = result_ = 0;
            split_values(shape_, split_, result_ * STEP, first_ + step_, to, between);
            if (++step_ == key_steps_) step_ = 0, ++result_;
        }
        ++next_;
    }

    // Sums over `steps` units for each of `count` results. rows: the first step in the first row.
    template <bool keys, typename Store>
    __attribute__((always_inline)) void multiply(const char* rows, int64_t stride, int count, int steps,
                                                 const Store& store) {
        for (int result = 0; result < count; ++result) {
            zero_sums<R>();
            for (int step = 0; step < steps; ++step) {
                const StepOperands now = {rows + step * 128, stride, unit(now_++)};
                if (next_ == end_) {
                    multiply_unit<R>(now, NOTHING_BETWEEN);
                    continue;
                }
                split_next<keys>([&](auto j) __attribute__((always_inline)) {
                    constexpr int first = UNIT_OPERATIONS * decltype(j)::value / UNIT_ROWS;
                    constexpr int end = UNIT_OPERATIONS * (decltype(j)::value + 1) / UNIT_ROWS;
                    if constexpr (first < end) unit_operation<R, first>(now);
                });
            }
            store(result);
        }
    }

    const AttentionShape& shape_;
    const QueryBlock& block_;
    const SplitKeys& split_;
    const int first_, key_steps_, dim_steps_, column_pairs_, end_;  // steps of keys, from the first on; units
    int next_ = 0, result_ = 0, step_ = 0;                          // the unit that is split next
    int now_ = 0;                                                   // that is multiplied next
};

// Many rows: two tiles of them at a time.
class ManyRows {
  public:
    ManyRows(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split)
        : shape_(shape),
          block_(block),
          split_(split),
          dim_steps_(steps_of(shape.head_dim)),
          column_pairs_(steps_of(shape.padded_dim)),
          values_(block.units + SPLIT_STEPS * dim_steps_ * UNIT_BYTES) {}

    // The scores of rows are computed, and the result of those two pairs before, while those between them become
    // probabilities; meanwhile, before there are any, values are split.
    void attend() {
        split_all_keys();
        const int32_t pairs = (block_.rows + 31) / 32;
        for (int32_t i = 0; i < pairs + 2; ++i) {
            int slots = 0;
            if (i < pairs) slots += UNIT_SLOTS * count(i) * dim_steps_;
            if (i >= 2) slots += UNIT_SLOTS * count(i - 2) * column_pairs_;
            if (i == 0) {
                ValueSplitting splitting(*this);
                multiply(i, slots, splitting);
            } else {
                RowsSoftmax softmax(shape_, block_, split_.start, 32 * (i - 1), i <= pairs ? rows(i - 1) : 0,
                                    scores(i - 1));
                multiply(i, slots, softmax);
            }
        }
    }

  private:
    static constexpr int SCORED_PAIRS = 3;  // of rows, at a time

    int32_t rows(int32_t pair) const { return block_.rows - 32 * pair < 32 ? block_.rows - 32 * pair : 32; }
    float* scores(int32_t pair) const {
        return block_.scores + (pair + SCORED_PAIRS) % SCORED_PAIRS * 32 * SCORES_OF_ROW;
    }
    Interval steps(int32_t pair) const {
        const Interval seen = seen_of_split(shape_, block_, split_.start, 32 * pair, 32 * pair + rows(pair) - 1);
        return {seen.begin / STEP, steps_of(seen.end)};
    }
    int count(int32_t pair) const { return steps(pair).empty() ? 0 : steps(pair).end - steps(pair).begin; }

    char* key_unit(int key_step, int step) const { return block_.units + (key_step * dim_steps_ + step) * UNIT_BYTES; }
    char* value_unit(int columns, int key_step) const {
        return values_ + (columns * SPLIT_STEPS + key_step) * UNIT_BYTES;
    }
    void split_all_keys() const {
        const Interval all = split_.steps();
        for (int key_step = all.begin; key_step < all.end; ++key_step)
            for (int step = 0; step < dim_steps_; ++step)
                split_keys(shape_, split_, key_step, step, key_unit(key_step, step), NOTHING_BETWEEN);
    }

    // All values, unit by unit.
    class ValueSplitting {
      public:
        explicit ValueSplitting(const ManyRows& rows) : rows_(rows), key_step_(rows.split_.steps().begin) {}
        int remaining() const {
            const Interval all = rows_.split_.steps();
            return (all.end - key_step_) * rows_.column_pairs_ - columns_;
        }
        __attribute__((noinline)) void advance() {
            if (remaining() == 0) return;
            split_values(rows_.shape_, rows_.split_, columns_ * STEP, key_step_, rows_.value_unit(columns_, key_step_),
                         NOTHING_BETWEEN);
            if (++columns_ == rows_.column_pairs_) columns_ = 0, ++key_step_;
        }
        void finish() {
            while (remaining() > 0) advance();
        }

      private:
        const ManyRows& rows_;
        int key_step_, columns_ = 0;
    };

    // The products of round `i`, which have so many slots for other work.
    template <typename Work>
    void multiply(int32_t i, int slots, Work& work) const {
        const int items = work.remaining();
        int credit = 0;
        const auto advance = [&]() __attribute__((always_inline)) {
            for (credit += items; credit >= slots; credit -= slots) work.advance();
        };
        if (i < (block_.rows + 31) / 32) score(i, advance);
        if (i >= 2) add_values(i - 2, advance);
        work.finish();
    }

    template <typename Between>
    void score(int32_t pair, const Between& between) const {
        if (rows(pair) > 16)
            score_tiles<2>(pair, between);
        else
            score_tiles<1>(pair, between);
    }
    template <int R, typename Between>
    void score_tiles(int32_t pair, const Between& between) const {
        const int64_t stride = split_row_bytes(shape_.head_dim);
        const Interval seen = steps(pair);
        for (int key_step = seen.begin; key_step < seen.end; ++key_step) {
            zero_sums<R>();
            for (int step = 0; step < dim_steps_; ++step)
                multiply_unit<R>({block_.tile_q + 32 * pair * stride + step * 128, stride, key_unit(key_step, step)},
                                 between);
            store_sums<R>(scores(pair) + key_step * STEP, SCORES_OF_ROW, true);
        }
    }

    template <typename Between>
    void add_values(int32_t pair, const Between& between) const {
        if (rows(pair) > 16)
            value_tiles<2>(pair, between);
        else
            value_tiles<1>(pair, between);
    }
    template <int R, typename Between>
    void value_tiles(int32_t pair, const Between& between) const {
        const Interval seen = steps(pair);
        const char* const probabilities = reinterpret_cast<const char*>(scores(pair));
        for (int columns = 0; columns < column_pairs_; ++columns) {
            zero_sums<R>();
            for (int key_step = seen.begin; key_step < seen.end; ++key_step)
                multiply_unit<R>({probabilities + key_step * 128, SCORE_BYTES, value_unit(columns, key_step)}, between);
            store_sums<R>(block_.split_out + static_cast<int64_t>(32) * pair * shape_.padded_dim + columns * STEP,
                          shape_.padded_dim, has_two_tiles(shape_, columns));
        }
    }

    const AttentionShape& shape_;
    const QueryBlock& block_;
    const SplitKeys& split_;
    const int dim_steps_, column_pairs_;
    char* const values_;
};

// The block's attention over the keys of one split, as attend_split.
inline void attend_split_tiles(const AttentionShape& shape, const HeadCache& cache, const QueryBlock& block,
                               int32_t index) {
    const SplitKeys split = find_split(shape, cache, block, index);
    if (block.rows <= 16)
        FewRows<1>(shape, block, split).attend();
    else if (block.rows <= 32)
        FewRows<2>(shape, block, split).attend();
    else
        ManyRows(shape, block, split).attend();
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
