// Scores of one query row in one chunk of keys, turned into probabilities under a running maximum.
#pragma once

#include "attention_tile.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr float NO_SCORE = -1e30f;  // below every score; finite, so that differences are defined

// What happens to a score q . k (the scale is in q already).
struct ScoreRule {
    float softcap;   // 0: none
    float slope;     // ALiBi; 0: none
    float distance;  // position of the chunk's first key minus that of the query
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

// Lanes [begin, end) of a vector, the others replaced.
inline F32x16 keep_lanes(F32x16 a, int begin, int end, float replacement) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < 16; ++i)
        if (i < begin || i >= end) lanes[i] = replacement;
    return load(lanes);
}

constexpr float LANE_INDEX[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline F32x16 apply_rule(F32x16 score, const ScoreRule& rule, int group) {
    if (rule.softcap != 0.0f) score = soft_cap(score, rule.softcap);
    if (rule.slope != 0.0f) {
        const F32x16 distance = load(LANE_INDEX) + broadcast(rule.distance + static_cast<float>(group * 16));
        score = score + broadcast(rule.slope) * distance;
    }
    return score;
}

// scores[begin, end) become probabilities relative to the new maximum; `max` and `sum` (16 lanes) are updated.
// Returns the factor that brings earlier results to the new maximum. Scores outside [begin, end) are not read.
inline float softmax_chunk(float* scores, int begin, int end, const ScoreRule& rule, float* max_score, float* sum) {
    const int first = begin / 16, last = (end - 1) / 16;
    const bool plain = rule.softcap == 0.0f && rule.slope == 0.0f;
    F32x16 largest = broadcast(NO_SCORE);
    for (int g = first; g <= last; ++g) {
        F32x16 score = load(scores + g * 16);
        if (!plain) score = apply_rule(score, rule, g);
        const bool partial = g * 16 < begin || g * 16 + 16 > end;
        if (partial) score = keep_lanes(score, begin - g * 16, end - g * 16, NO_SCORE);
        if (partial || !plain) store(scores + g * 16, score);
        largest = max(largest, score);
    }
    const float chunk_max = reduce_max(largest);
    const float new_max = chunk_max > *max_score ? chunk_max : *max_score;
    const float rescale = new_max == *max_score ? 1.0f : exp_scalar(*max_score - new_max);
    F32x16 total = load(sum) * broadcast(rescale);
    for (int g = first; g <= last; ++g) {
        F32x16 p = exp(load(scores + g * 16) - broadcast(new_max));
        if (g * 16 < begin || g * 16 + 16 > end) p = keep_lanes(p, begin - g * 16, end - g * 16, 0.0f);
        store(scores + g * 16, p);
        total = total + p;
    }
    store(sum, total);
    *max_score = new_max;
    return rescale;
}

}  // namespace
}  // namespace octavo
