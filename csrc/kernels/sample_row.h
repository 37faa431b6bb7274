// One row of logits: scanning, penalties, the choice and what is reported. Meaning: backends/sampling.py.
#pragma once

#include "sample_select.h"
#include "sampling.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int32_t PANEL = 256;  // logits whose maximum and sum are kept, to skip and to find places quickly
constexpr float LARGEST = 3.402823466e38f;
constexpr float NONE = -__builtin_huge_valf();
constexpr float SMALLEST_X = -87.0f;

enum RowError : int32_t { ROW_OK, ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, ROW_TOKEN_ID_OUT_OF_RANGE };

// Logits with the maxima of their panels.
struct Logits {
    const float* data;
    int32_t size;
    float max;
    float* panel_max;
    int32_t panels() const { return (size + PANEL - 1) / PANEL; }
    int32_t panel_end(int32_t panel) const { return panel * PANEL + PANEL < size ? panel * PANEL + PANEL : size; }
};

// The memory of one worker, for rows of `vocab` logits.
struct RowBuffers {
    float* changed;                // logits with bias, mask and penalties
    float *raw_max, *changed_max;  // of panels
    double* panel_sum;
    Candidates candidates;
    SelectBuffers select;
};

inline F32x16 load_upto(const float* p, int32_t n) { return n >= 16 ? load(p) : load_partial(p, n, NONE); }

// Fills in the maxima. Returns false if a logit is NaN.
inline bool scan(Logits& logits) {
    F32x16 poison = broadcast(0.0f);
    logits.max = NONE;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        F32x16 largest = broadcast(NONE);
        for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16) {
            const F32x16 lanes = load_upto(logits.data + i, end - i);
            largest = max(largest, lanes);
            poison = fma(lanes, broadcast(0.0f), poison);
        }
        logits.panel_max[p] = reduce_max(largest);
        logits.max = logits.panel_max[p] > logits.max ? logits.panel_max[p] : logits.max;
    }
    const float sum = reduce_add(poison);
    if (sum == sum) return true;
    for (int32_t i = 0; i < logits.size; ++i)  // an infinity or a NaN: the two need a closer look
        if (logits.data[i] != logits.data[i]) return false;
    return true;
}

inline bool ids_in_range(const int32_t* ids, int32_t begin, int32_t end, int32_t vocab) {
    for (int32_t i = begin; i < end; ++i)
        if (ids[i] < 0 || ids[i] >= vocab) return false;
    return true;
}

inline bool changes_logits(const SamplingBatch& b, int32_t row) {
    const bool penalties =
        b.repetition_penalty[row] != 1.0f || b.presence_penalty[row] != 0.0f || b.frequency_penalty[row] != 0.0f;
    return b.allowed_mask || b.bias_start[row + 1] > b.bias_start[row] ||
           (penalties && b.history_start[row + 1] > b.history_start[row]);
}

// Stages 1 and 2, in place.
inline void change_logits(const SamplingBatch& b, int32_t row, int32_t vocab, float* logits) {
    for (int32_t i = b.bias_start[row]; i < b.bias_start[row + 1]; ++i) logits[b.bias_ids[i]] += b.bias_values[i];
    if (b.allowed_mask) {
        const uint32_t* words = b.allowed_mask + static_cast<int64_t>(row) * ((vocab + 31) / 32);
        for (int32_t i = 0; i < vocab; i += 32) {
            const uint32_t word = words[i / 32];
            if (word == 0xffffffffu) continue;
            const int32_t end = i + 32 < vocab ? i + 32 : vocab;
            for (int32_t id = i; id < end; ++id)
                if (!(word >> (id - i) & 1u)) logits[id] = NONE;
        }
    }
    const float repetition = b.repetition_penalty[row];
    for (int32_t i = b.history_start[row]; i < b.history_start[row + 1]; ++i) {
        float& logit = logits[b.history_ids[i]];
        const int32_t count = b.history_counts[i];
        if (repetition != 1.0f) logit = logit > 0 ? logit / repetition : logit * repetition;
        logit -= b.frequency_penalty[row] * static_cast<float>(count);
        if (count > 0) logit -= b.presence_penalty[row];
        logit = logit < LARGEST ? logit : LARGEST;
    }
    for (int32_t i = b.bias_start[row]; i < b.bias_start[row + 1]; ++i) {
        float& logit = logits[b.bias_ids[i]];
        logit = logit < LARGEST ? logit : LARGEST;
    }
}

inline int32_t largest_id(const Logits& logits) {
    int32_t p = 0;
    while (logits.panel_max[p] != logits.max) ++p;
    int32_t i = p * PANEL;
    while (logits.data[i] != logits.max) ++i;
    return i;
}

// x and weights of logits under one temperature.
struct Softening {
    float max, temperature, smallest_x;

    F32x16 x_of(F32x16 logits) const { return (logits - broadcast(max)) / broadcast(temperature); }
    F32x16 weight_of(F32x16 x) const { return select_greater(broadcast(smallest_x), x, broadcast(0.0f), exp(x)); }
    bool reaches(float logit, float x) const { return (logit - max) / temperature >= x; }
};

// Sums of the weights of each panel; returns the sum of all.
inline double sum_weights(const Logits& logits, const Softening& soft, double* panel_sum) {
    double total = 0;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        panel_sum[p] = 0;
        if (!soft.reaches(logits.panel_max[p], soft.smallest_x)) continue;
        F32x16 sum = broadcast(0.0f);
        for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16)
            sum = sum + soft.weight_of(soft.x_of(load_upto(logits.data + i, end - i)));
        panel_sum[p] = reduce_add(sum);
        total += panel_sum[p];
    }
    return total;
}

// x and weights of one panel.
inline void soften_panel(const Logits& logits, const Softening& soft, int32_t panel, float* x, float* weights) {
    for (int32_t i = panel * PANEL, end = logits.panel_end(panel), to = 0; i < end; i += 16, to += 16) {
        const F32x16 lanes = soft.x_of(load_upto(logits.data + i, end - i));
        store(x + to, lanes);
        store(weights + to, soft.weight_of(lanes));
    }
}

// Without a filter: the panel, then the token, where the cumulative weight exceeds draw * total. The last one that
// weighs anything answers where rounding carries the target beyond it.
inline int32_t draw_from_all(const Logits& logits, const Softening& soft, double draw, double* panel_sum) {
    const double target = draw * sum_weights(logits, soft, panel_sum);
    double before = 0, cumulative = 0;
    int32_t panel = 0, chosen = 0;
    for (int32_t p = 0; p < logits.panels() && cumulative <= target; ++p) {
        if (panel_sum[p] == 0) continue;
        panel = p;
        before = cumulative;
        cumulative += panel_sum[p];
    }
    float x[PANEL], weights[PANEL];
    soften_panel(logits, soft, panel, x, weights);
    const int32_t count = logits.panel_end(panel) - panel * PANEL;
    for (int32_t i = 0; i < count && before <= target; ++i) {
        if (weights[i] == 0) continue;
        before += weights[i];
        chosen = panel * PANEL + i;
    }
    return chosen;
}

}  // namespace
}  // namespace octavo
