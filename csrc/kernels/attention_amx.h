// Attention of a block of query rows to one split of keys, with both products on AMX tiles.
//
// Tiles multiply bfloat16. To keep the accuracy of float32, a number x is split in two, high = x with a mantissa of
// eight bits and low = x - high, and three products are added: low * high, high * high and high * low. float16 has
// eleven bits, so keys and values are split without loss; queries and probabilities keep about sixteen bits. The
// omitted term is below 2^-16 of a product.
//
// Each tile row of an operand has 32 numbers. Numbers j and j + 16 form pair j, so that two vectors of floats become
// pairs by a shift. Each score is one chain of tile products over increasing dimensions. Each result is one chain over
// increasing keys of the split, starting from zero. The maximum covers the whole split, so nothing is rescaled. Keys
// that a row does not see have probability zero and change no bit of its sums, so a row is the same in every block.
#pragma once

#include "attention_amx_operands.h"
#include "attention_amx_softmax.h"

namespace octavo {
namespace {

constexpr int64_t SCORE_BYTES = SCORES_OF_ROW * sizeof(float);

// Whether both halves of a pair of output columns exist.
inline bool has_two_tiles(const AttentionShape& shape, int pair) { return pair * STEP + 16 < shape.padded_dim; }

// A block of at most 32 rows, R tiles. While one unit of keys or values is multiplied, the next one is split: one waits
// for tiles and the other for vectors.
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

    // Splits the next unit. Units of keys come before units of values.
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
    const int first_, key_steps_, dim_steps_, column_pairs_, end_;  // key steps begin at first_; end_ counts all units
    int next_ = 0, result_ = 0, step_ = 0;                          // the next unit to split
    int now_ = 0;                                                   // the next unit to multiply
};

// Many rows, two tiles of rows at a time.
class ManyRows {
  public:
    ManyRows(const AttentionShape& shape, const QueryBlock& block, const SplitKeys& split)
        : shape_(shape),
          block_(block),
          split_(split),
          dim_steps_(steps_of(shape.head_dim)),
          column_pairs_(steps_of(shape.padded_dim)),
          values_(block.units + SPLIT_STEPS * dim_steps_ * UNIT_BYTES) {}

    // Computes the scores of pair i and the results of pair i - 2 while the scores of pair i - 1 become probabilities.
    // In the first round there are no scores yet, so the values are split instead.
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
    static constexpr int SCORED_PAIRS = 3;  // pairs of rows in flight

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

    // Splits all values, one unit at a time.
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

    // Multiplies in round `i`, which offers `slots` slots for other work.
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

// Attends from the block to the keys of one split, like attend_split.
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

// Tiles get the block's row count if all blocks of the step fill one or two tiles.
inline void configure_row_tiles(int32_t rows) {
    const int32_t rest = rows - 16;
    configure_tiles({rest < 0 ? rows : 16, rest <= 0 || rest > 16 ? 16 : rest});
}

}  // namespace
}  // namespace octavo
