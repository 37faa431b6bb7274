// Chooses a row's experts. Routing in octavo/graph/ops/moe.py defines the result.
#pragma once

#include "activations.h"

namespace octavo {
namespace {

struct Routing {
    int32_t experts, top_k;
    int64_t scoring;
    bool normalize;
    float scale, jitter;
    int32_t num_groups, top_groups, group_best;
    bool on_input;                // weights multiply the experts' inputs, not their outputs
    const float* selection_bias;  // [experts], or null
    const float* expert_scale;    // [experts] factors for the weights, or null
};

// Scratch for the choice of one row, `experts` numbers in each array.
struct RoutingScratch {
    float *scores, *rank, *groups;
    int32_t* best;
};

constexpr float LEAST_RANK = -3.402823466e38f, NO_RANK = -__builtin_huge_valf();

// Turns the router's outputs into scores of all experts, in place.
inline void score_experts(float* scores, int32_t n, int64_t scoring) {
    float largest = scores[0];
    for (int32_t i = 1; i < n; ++i) largest = scores[i] > largest ? scores[i] : largest;
    float total = 0.0f;
    for (int32_t i = 0; i < n; i += 16) {
        const int lanes = n - i < 16 ? n - i : 16;
        const F32x16 s = load_partial(scores + i, lanes);
        store_partial(scores + i, scoring == KIND_SOFTMAX ? exp(s - broadcast(largest)) : sigmoid(s), lanes);
    }
    for (int32_t i = 0; i < n; ++i) total += scores[i];
    for (int32_t i = 0; scoring == KIND_SOFTMAX && i < n; ++i) scores[i] /= total;
}

// The indices of the `count` highest ranks, highest first, the lower index first among equals. Skips NO_RANK.
inline void find_best(const float* rank, int32_t n, int32_t count, int32_t* best) {
    int32_t found = 0;
    for (int32_t i = 0; i < n; ++i) {
        if (!(rank[i] > (found < count ? NO_RANK : rank[best[count - 1]]))) continue;
        int32_t at = found < count ? found++ : count - 1;
        for (; at > 0 && rank[i] > rank[best[at - 1]]; --at) best[at] = best[at - 1];
        best[at] = i;
    }
}

// Removes the rank of all experts outside the best groups.
inline void keep_groups(const Routing& r, const RoutingScratch& s) {
    const int32_t size = r.experts / r.num_groups;
    for (int32_t g = 0; g < r.num_groups; ++g) {
        const float* const rank = s.rank + g * size;
        find_best(rank, size, r.group_best, s.best);
        float total = 0.0f;
        for (int32_t i = r.group_best - 1; i >= 0; --i) total += rank[s.best[i]];
        s.groups[g] = total > LEAST_RANK ? total : LEAST_RANK;
    }
    find_best(s.groups, r.num_groups, r.top_groups, s.best);
    for (int32_t i = 0; i < r.top_groups; ++i) s.groups[s.best[i]] = NO_RANK;
    for (int32_t e = 0; e < r.experts; ++e)
        if (s.groups[e / size] != NO_RANK) s.rank[e] = NO_RANK;
}

// SparseMixer: the weight of a chosen expert is its share of a softmax over the outputs close to its own, without the
// experts chosen earlier.
inline void mix_sparsely(const Routing& r, const float* logits, const RoutingScratch& s, int32_t* chosen) {
    find_best(logits, r.experts, r.top_k, chosen);
    for (int32_t i = 0; i < r.top_k; ++i) {
        const float best = logits[chosen[i]];
        for (int32_t e = 0; e < r.experts; e += 16) {
            const int lanes = r.experts - e < 16 ? r.experts - e : 16;
            store_partial(s.rank + e, exp(load_partial(logits + e, lanes) - broadcast(best)), lanes);
        }
        for (int32_t j = 0; j < i; ++j) s.rank[chosen[j]] = 0.0f;
        float total = 0.0f;
        for (int32_t e = 0; e < r.experts; ++e) {
            const float size = __builtin_fabsf(logits[e]) > best ? __builtin_fabsf(logits[e]) : best;
            if (!((best - logits[e]) / size > 2.0f * r.jitter)) total += s.rank[e];
        }
        s.scores[chosen[i]] = 1.0f / total;
    }
}

// The top_k experts of a row in increasing order, with their weights. logits: the router's outputs.
inline void choose_experts(const Routing& r, const float* logits, const RoutingScratch& s, int32_t* chosen,
                           float* weights) {
    float* const scores = s.scores;
    if (r.scoring == KIND_SPARSEMIXER) {
        mix_sparsely(r, logits, s, chosen);
    } else {
        __builtin_memcpy(scores, logits, sizeof(float) * r.experts);
        score_experts(scores, r.experts, r.scoring);
        for (int32_t e = 0; e < r.experts; ++e) {
            const float rank = r.selection_bias ? scores[e] + r.selection_bias[e] : scores[e];
            s.rank[e] = rank > LEAST_RANK ? rank : LEAST_RANK;  // NaN comes last
        }
        if (r.num_groups > 1) keep_groups(r, s);
        find_best(s.rank, r.experts, r.top_k, chosen);
    }
    float total = 0.0f;
    for (int32_t i = 0; i < r.top_k; ++i) total += scores[chosen[i]];
    for (int32_t i = 1; i < r.top_k; ++i)
        for (int32_t j = i; j > 0 && chosen[j - 1] > chosen[j]; --j) {
            const int32_t t = chosen[j];
            chosen[j] = chosen[j - 1];
            chosen[j - 1] = t;
        }
    for (int32_t i = 0; i < r.top_k; ++i) {
        weights[i] = scores[chosen[i]] / (r.normalize ? total + 1e-20f : 1.0f) * r.scale;
        if (r.expert_scale) weights[i] *= r.expert_scale[chosen[i]];
    }
}

}  // namespace
}  // namespace octavo
