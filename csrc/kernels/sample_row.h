// One row of logits: its maxima, and the effects of bias, mask and penalties, as defined in backends/sampling.py.
#pragma once

#include "sample_plan.h"
#include "sample_select.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr int32_t PANEL = 256;  // logits per stored maximum and sum, which speed up skipping and searching
constexpr float LARGEST = 3.402823466e38f;
constexpr float NONE = -__builtin_huge_valf();

enum RowError : int32_t { ROW_OK, ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, ROW_TOKEN_ID_OUT_OF_RANGE };

// Logits of consecutive tokens, with the maxima of their panels.
struct Logits {
    const float* data;
    int32_t size;
    float max;
    float min;  // a lower bound of all logits except -inf; a hint
    float* panel_max;
    int32_t panels() const { return (size + PANEL - 1) / PANEL; }
    int32_t panel_end(int32_t panel) const { return panel * PANEL + PANEL < size ? panel * PANEL + PANEL : size; }
};

// Bit i: lane i of a is greater than lane i of b.
inline uint32_t greater_bits(F32x16 a, F32x16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)) << 8);
#else
    float x[16], y[16];
    store(x, a);
    store(y, b);
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(x[i] > y[i]) << i;
    return bits;
#endif
}

inline F32x16 load_upto(const float* p, int32_t n) { return n >= 16 ? load(p) : load_partial(p, n, NONE); }

// The hardware prefetcher stops at the end of a page.
inline void prefetch(const float* p) { __builtin_prefetch(p + 512); }

// The running maximum of a panel, and the minimum and NaNs of a row.
struct Extremes {
    F32x16 largest = broadcast(NONE), smallest = broadcast(LARGEST), nans = broadcast(0.0f);

    void see(F32x16 lanes) {
        const F32x16 zero = broadcast(0.0f), none = broadcast(NONE);
        largest = max(largest, lanes);
        smallest = select_greater(lanes, none, min(lanes, smallest), smallest);
        // A NaN is neither greater than -inf nor less than a number.
        nans =
            nans + select_greater(lanes, none, zero, select_greater(broadcast(LARGEST), lanes, zero, broadcast(1.0f)));
    }
    float take_largest() {
        const float result = reduce_max(largest);
        largest = broadcast(NONE);
        return result;
    }
    float find_smallest() const { return -reduce_max(broadcast(0.0f) - smallest); }
    bool sound() const { return reduce_add(nans) == 0; }
};

// Fills in the maxima and the minimum. Returns false if a logit is NaN.
inline bool scan(Logits& logits) {
    Extremes extremes;
    logits.max = NONE;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16) {
            prefetch(logits.data + i);
            extremes.see(load_upto(logits.data + i, end - i));
        }
        logits.panel_max[p] = extremes.take_largest();
        logits.max = logits.panel_max[p] > logits.max ? logits.panel_max[p] : logits.max;
    }
    logits.min = extremes.find_smallest();
    return extremes.sound();
}

inline bool ids_in_range(const int32_t* ids, int32_t begin, int32_t end, int32_t vocab) {
    for (int32_t i = begin; i < end; ++i)
        if (ids[i] < 0 || ids[i] >= vocab) return false;
    return true;
}

// The words of the row's mask; null if everything is allowed.
inline const uint32_t* allowed_words(const SamplingBatch& b, int32_t row, int32_t vocab) {
    return b.allowed_mask ? b.allowed_mask + static_cast<int64_t>(row) * ((vocab + 31) / 32) : nullptr;
}

// Keeps the lanes whose bit is set and replaces the rest by -inf. bits / 2^(lane + 1) has a fraction of at least a half
// if the bit is set. The added quarter avoids a fraction of exactly a half, so that the nearest integer is above it.
inline F32x16 keep_allowed(F32x16 lanes, uint32_t bits) {
    static constexpr float HALVES[16] = {0x1p-1f, 0x1p-2f,  0x1p-3f,  0x1p-4f,  0x1p-5f,  0x1p-6f,  0x1p-7f,  0x1p-8f,
                                         0x1p-9f, 0x1p-10f, 0x1p-11f, 0x1p-12f, 0x1p-13f, 0x1p-14f, 0x1p-15f, 0x1p-16f};
    const F32x16 halved = broadcast(static_cast<float>(bits) + 0.25f) * load(HALVES);
    return select_greater(round_even(halved), halved, lanes, broadcast(NONE));
}

// Copies the logits of `raw` that the mask allows, and finds the maxima of panels; +inf becomes the largest finite
// number. words: null allows everything. to: the data of `copy`. Returns false if a logit is NaN.
inline bool copy_allowed(const Logits& raw, const uint32_t* words, float* to, Logits& copy) {
    Extremes of_raw, of_copy;
    for (int32_t p = 0; p < raw.panels(); ++p) {
        for (int32_t i = p * PANEL, end = raw.panel_end(p); i < end; i += 16) {
            prefetch(raw.data + i);
            F32x16 lanes = load_upto(raw.data + i, end - i);
            of_raw.see(lanes);
            lanes = min(lanes, broadcast(LARGEST));
            if (words) lanes = keep_allowed(lanes, words[i / 32] >> (i & 16) & 0xffffu);
            of_copy.see(lanes);
            store(to + i, lanes);  // rows are padded to whole panels
        }
        copy.panel_max[p] = of_copy.take_largest();
    }
    copy.min = of_copy.find_smallest();
    return of_raw.sound();
}

// Stage 1 except the mask, and stage 2: changes single logits in `data`, which `logits` describes. The maxima of their
// panels become NaN. first: the token of the first logit, in a vocabulary of `vocab`; skips tokens not in `logits`.
inline void change_logits(const SamplingBatch& b, int32_t row, int32_t first, int32_t vocab, float* data,
                          Logits& logits) {
    const uint32_t* words = allowed_words(b, row, vocab);
    const auto is_here = [&](int32_t id) { return id >= first && id - first < logits.size; };
    const auto set = [&](int32_t at, float logit) {
        data[at] = logit < LARGEST ? logit : LARGEST;
        logits.panel_max[at / PANEL] = __builtin_nanf("");
        logits.min = logit > NONE && logit < logits.min ? logit : logits.min;
    };
    for (int32_t i = b.bias_start[row]; i < b.bias_start[row + 1]; ++i) {
        const int32_t id = b.bias_ids[i];
        if (is_here(id) && (!words || words[id / 32] >> (id % 32) & 1u)) data[id - first] += b.bias_values[i];
    }
    const float repetition = b.rows[row].repetition_penalty;
    for (int32_t i = b.history_start[row]; i < b.history_start[row + 1]; ++i) {
        if (!is_here(b.history_ids[i])) continue;
        float logit = data[b.history_ids[i] - first];
        const int32_t count = b.history_counts[i];
        if (repetition != 1.0f) logit = logit > 0 ? logit / repetition : logit * repetition;
        logit -= b.rows[row].frequency_penalty * static_cast<float>(count);
        if (count > 0) logit -= b.rows[row].presence_penalty;
        set(b.history_ids[i] - first, logit);
    }
    for (int32_t i = b.bias_start[row]; i < b.bias_start[row + 1]; ++i)
        if (is_here(b.bias_ids[i])) set(b.bias_ids[i] - first, data[b.bias_ids[i] - first]);
}

// Computes the maxima that change_logits invalidated, and the overall maximum.
inline void update_maxima(Logits& logits) {
    logits.max = NONE;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        float& largest = logits.panel_max[p];
        if (largest != largest) {
            F32x16 lanes = broadcast(NONE);
            for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16)
                lanes = max(lanes, load_upto(logits.data + i, end - i));
            largest = reduce_max(lanes);
        }
        logits.max = largest > logits.max ? largest : logits.max;
    }
}

inline int32_t largest_id(const Logits& logits) {
    int32_t p = 0;
    while (logits.panel_max[p] != logits.max) ++p;
    int32_t i = p * PANEL;
    while (logits.data[i] != logits.max) ++i;
    return i;
}

}  // namespace
}  // namespace octavo
