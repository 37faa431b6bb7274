// Turns the scores of one query row in one chunk of keys into probabilities under a running maximum.
#pragma once

#include "attention_tile.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr float NO_SCORE = -1e30f;  // below every score; finite, so that differences are defined

// What a head adds to scores depending on the distance of key and query: 2 * reach + 1 values, from the furthest key
// before the query to the furthest key after it. Keys beyond that use the value at the end.
struct DistanceBias {
    const float* values;  // null: no bias
    int32_t reach;
};

// Selects a head from the values of all heads: [num_heads, 2 * reach + 1] or null.
inline DistanceBias distance_bias_of(const float* values, int64_t size, int32_t num_heads, int64_t head) {
    const int64_t width = values ? size / num_heads : 1;
    return {values ? values + head * width : nullptr, static_cast<int32_t>(width / 2)};
}

// The transformations of a score q . k, in order (q is already scaled).
struct ScoreRule {
    float softcap;      // 0: no cap
    float slope;        // ALiBi; 0: no slope
    float distance;     // position of the chunk's first key minus the query's position
    DistanceBias bias;  // applied last
};

// cap * tanh(x / cap), absolute error about 1e-7 * cap.
inline F32x16 soft_cap(F32x16 x, float cap) {
    const F32x16 one = broadcast(1.0f), e = exp(x * broadcast(2.0f / cap));
    return broadcast(cap) * (one - broadcast(2.0f) / (e + one));
}

inline float exp_scalar(float x) {
    float lanes[16];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
}

constexpr float LANE_INDEX[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Keeps lanes [begin, end) of a vector and replaces all other lanes.
inline F32x16 keep_lanes(F32x16 a, int begin, int end, float replacement) {
    const F32x16 lane = load(LANE_INDEX), other = broadcast(replacement);
    const F32x16 from_begin = select_greater(lane, broadcast(static_cast<float>(begin) - 0.5f), a, other);
    return select_greater(broadcast(static_cast<float>(end) - 0.5f), lane, from_begin, other);
}

// The values for 16 keys. The first key is `distance` positions after the query.
inline F32x16 load_bias(const DistanceBias& bias, int32_t distance) {
    if (distance >= -bias.reach && distance + 15 <= bias.reach) return load(bias.values + bias.reach + distance);
    float lanes[16];
    for (int32_t i = 0; i < 16; ++i) {
        const int32_t apart = distance + i < -bias.reach ? -bias.reach : distance + i;
        lanes[i] = bias.values[bias.reach + (apart < bias.reach ? apart : bias.reach)];
    }
    return load(lanes);
}

inline F32x16 apply_rule(F32x16 score, const ScoreRule& rule, int group) {
    if (rule.softcap != 0.0f) score = soft_cap(score, rule.softcap);
    if (rule.slope != 0.0f) {
        const F32x16 distance = load(LANE_INDEX) + broadcast(rule.distance + static_cast<float>(group * 16));
        score = score + broadcast(rule.slope) * distance;
    }
    if (rule.bias.values) score = score + load_bias(rule.bias, static_cast<int32_t>(rule.distance) + group * 16);
    return score;
}

// One row's part of a chunk.
struct RowScores {
    float* scores;   // [CHUNK]; not read outside [begin, end)
    int begin, end;  // keys that the row sees; begin >= end: none
    ScoreRule rule;
};

// Returns the largest score. Applies the rules and hides lanes outside the range, in place.
inline float largest_score(const RowScores& row) {
    if (row.begin >= row.end) return NO_SCORE;
    const bool plain = row.rule.softcap == 0.0f && row.rule.slope == 0.0f && !row.rule.bias.values;
    F32x16 largest = broadcast(NO_SCORE);
    for (int g = row.begin / 16; g * 16 < row.end; ++g) {
        F32x16 score = load(row.scores + g * 16);
        if (!plain) score = apply_rule(score, row.rule, g);
        const bool partial = g * 16 < row.begin || g * 16 + 16 > row.end;
        if (partial) score = keep_lanes(score, row.begin - g * 16, row.end - g * 16, NO_SCORE);
        if (partial || !plain) store(row.scores + g * 16, score);
        largest = max(largest, score);
    }
    return reduce_max(largest);
}

// Turns scores into probabilities relative to `max_score`. Returns `sum` plus the probabilities, lane by lane.
inline F32x16 exponentiate(const RowScores& row, float max_score, F32x16 sum) {
    for (int g = row.begin / 16; g * 16 < row.end; ++g) {
        F32x16 p = exp(load(row.scores + g * 16) - broadcast(max_score));
        if (g * 16 < row.begin || g * 16 + 16 > row.end) p = keep_lanes(p, row.begin - g * 16, row.end - g * 16, 0.0f);
        store(row.scores + g * 16, p);
        sum = sum + p;
    }
    return sum;
}

// As above, for a row that sees the whole chunk and has no rules: the common case, without branches.
inline float largest_score_plain(const float* scores) {
    F32x16 largest = load(scores);
    for (int g = 1; g < CHUNK / 16; ++g) largest = max(largest, load(scores + g * 16));
    return reduce_max(max(largest, broadcast(NO_SCORE)));
}
inline F32x16 exponentiate_plain(float* scores, float max_score, F32x16 sum) {
    for (int g = 0; g < CHUNK / 16; ++g) {
        const F32x16 p = exp(load(scores + g * 16) - broadcast(max_score));
        store(scores + g * 16, p);
        sum = sum + p;
    }
    return sum;
}

// The running values of a tile's rows.
struct TileState {
    float* max;      // [rows]
    float* sum;      // [rows, 16]
    float* rescale;  // [rows] output: the factor that rescales earlier results to the new maximum
};

// Each pass handles the rows of a tile one after another, so that their dependency chains overlap.
inline void softmax_tile(const RowScores* rows, int count, bool plain, const TileState& state) {
    float change[16] = {};
    for (int r = 0; r < count; ++r) {
        const float chunk_max = plain ? largest_score_plain(rows[r].scores) : largest_score(rows[r]);
        const float new_max = chunk_max > state.max[r] ? chunk_max : state.max[r];
        change[r] = state.max[r] - new_max;
        state.max[r] = new_max;
    }
    store(change, exp(load(change)));
    for (int r = 0; r < count; ++r) {
        state.rescale[r] = change[r];
        const F32x16 sum = load(state.sum + r * 16) * broadcast(change[r]);
        store(state.sum + r * 16,
              plain ? exponentiate_plain(rows[r].scores, state.max[r], sum) : exponentiate(rows[r], state.max[r], sum));
    }
}

}  // namespace
}  // namespace octavo
