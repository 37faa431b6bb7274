// Turns scores from tiles into split probabilities, one step of a row at a time (attention_amx.h).
#pragma once

#include "attention_amx_operands.h"
#include "attention_softmax.h"

namespace octavo {
namespace {

// e^x for x <= 0, with fewer instructions than `exp`: a polynomial of degree 5 with a relative error below 2e-7,
// exactly 1 at 0. Inputs below -87 are clamped; NaN stays NaN.
inline F32x16 exp_of_difference(F32x16 x) {
    const F32x16 whole = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the lowest bits
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

// Turns the scores of some rows into split probabilities in place, one step of one row at a time, so that tiles can be
// multiplied meanwhile. The product with values uses the union of the rows' keys, so keys that a row does not see
// become zero.
class RowsSoftmax {
  public:
    // scores: those of the first row.
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
    // Replaces the lanes outside `keys` in a step.
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

    // Finds a row's maximum while the previous row is computed.
    void look_ahead(int32_t row, float* scores) {
        next_keys_ = seen_of_split(shape_, block_, start_, row, row);
        if (!has_rule(shape_)) {
            next_max_ = largest(scores, next_keys_);
            return;
        }
        next_max_ = largest_score({scores, next_keys_.begin, next_keys_.end, rule_of(shape_, block_, row, start_)});
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
    float* scores_;  // of the current row
    Interval steps_, keys_, next_keys_;
    int step_ = 0;
    float max_ = 0.0f, next_max_ = 0.0f;
    F32x16 sum_[2];
};

}  // namespace
}  // namespace octavo
