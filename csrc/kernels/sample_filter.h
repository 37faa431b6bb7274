// Filters over candidates (top-k, typical, top-p), the draw among them, and the reported log-probabilities.
#pragma once

#include "sample_row.h"

namespace octavo {
namespace {

// Candidates whose logit is at least `logit` and whose x is at least that of the softening, by ascending id.
inline void collect(const Logits& logits, const Softening& soft, float logit, Candidates& c) {
    int32_t count = 0;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        if (logits.panel_max[p] < logit || !soft.reaches(logits.panel_max[p], soft.smallest_x)) continue;
        for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16) {
            const F32x16 lanes = load_upto(logits.data + i, end - i), x = soft.x_of(lanes);
            if (reduce_max(lanes) < logit || reduce_max(x) < soft.smallest_x) continue;
            float xs[16], weights[16];
            store(xs, x);
            store(weights, soft.weight_of(x));
            for (int32_t lane = 0; lane < 16 && i + lane < end; ++lane) {
                c.ids[count] = i + lane;
                c.logits[count] = logits.data[i + lane];
                c.x[count] = xs[lane];
                c.weights[count] = weights[lane];
                count += logits.data[i + lane] >= logit && xs[lane] >= soft.smallest_x;
            }
        }
    }
    c.count = count;
}

// How much lies above each of a few thresholds of x, so that few candidates have to be collected.
constexpr int NUM_THRESHOLDS = 4;
constexpr float THRESHOLDS[NUM_THRESHOLDS] = {-2.5f, -5.0f, -9.0f, -15.0f};

struct Survey {
    double total;  // of everything
    double above[NUM_THRESHOLDS];
};

// by_mass: weights are summed, else tokens counted.
template <bool by_mass>
inline Survey survey(const Logits& logits, const Softening& soft) {
    Survey s{};
    for (int32_t p = 0; p < logits.panels(); ++p) {
        if (!soft.reaches(logits.panel_max[p], soft.smallest_x)) continue;
        F32x16 total = broadcast(0.0f), above[NUM_THRESHOLDS];
        for (int t = 0; t < NUM_THRESHOLDS; ++t) above[t] = total;
        for (int32_t i = p * PANEL, end = logits.panel_end(p); i < end; i += 16) {
            const F32x16 x = soft.x_of(load_upto(logits.data + i, end - i)), none = broadcast(0.0f);
            const F32x16 share =
                by_mass ? soft.weight_of(x) : select_greater(broadcast(soft.smallest_x), x, none, broadcast(1.0f));
            total = total + share;
            for (int t = 0; t < NUM_THRESHOLDS; ++t)
                above[t] = above[t] + select_greater(broadcast(THRESHOLDS[t]), x, none, share);
        }
        s.total += reduce_add(total);
        for (int t = 0; t < NUM_THRESHOLDS; ++t) s.above[t] += reduce_add(above[t]);
    }
    return s;
}

// The softening with the highest threshold above which there is at least `wanted`.
inline Softening restrict_to(const Survey& s, double wanted, Softening soft) {
    for (int t = 0; t < NUM_THRESHOLDS; ++t) {
        if (s.above[t] < wanted || THRESHOLDS[t] <= soft.smallest_x) continue;
        soft.smallest_x = THRESHOLDS[t];
        break;
    }
    return soft;
}

// A logit that at least k logits reach: the k-th largest maximum of the panels, of which there are more than k.
inline float reached_by(const Logits& logits, int32_t k, Candidates& c, const SelectBuffers& buffers) {
    c.count = logits.panels();
    for (int32_t p = 0; p < c.count; ++p) {
        c.ids[p] = p;
        c.keys[p] = logits.panel_max[p] > -LARGEST ? -logits.panel_max[p] : LARGEST;
    }
    const float border = -find_border(c, false, k, buffers).key;
    return border > -LARGEST ? border : NONE;
}

inline void order_by_likelihood(Candidates& c) {
    for (int32_t i = 0; i < c.count; ++i) c.keys[i] = c.logits[i] > -LARGEST ? -c.logits[i] : LARGEST;
}

inline double total_weight(const Candidates& c) {
    double total = 0;
    for (int32_t i = 0; i < c.count; ++i) total += c.weights[i];
    return total;
}

inline void keep_top_k(Candidates& c, int32_t k, const SelectBuffers& buffers) {
    if (c.count <= k) return;
    order_by_likelihood(c);
    keep_until(c, find_border(c, false, k, buffers));
}

inline void keep_typical(Candidates& c, float typical_p, const SelectBuffers& buffers) {
    double weighted = 0;
    for (int32_t i = 0; i < c.count; ++i) weighted += static_cast<double>(c.weights[i]) * c.x[i];
    const double total = total_weight(c);
    const float mean = static_cast<float>(weighted / total);
    for (int32_t i = 0; i < c.count; ++i) c.keys[i] = __builtin_fabsf(c.x[i] - mean);
    keep_until(c, find_border(c, true, typical_p * total, buffers));
}

// total: the mass of which top_p is a share; the candidates may be only the likeliest part of it.
inline void keep_top_p(Candidates& c, float top_p, double total, const SelectBuffers& buffers) {
    order_by_likelihood(c);
    keep_until(c, find_border(c, true, top_p * total, buffers));
}

// Only top_p: candidates that hold the mass that is asked for, and the mass of everything.
inline void collect_mass(const Logits& logits, const Softening& soft, float top_p, RowBuffers& buffers) {
    const Survey s = survey<true>(logits, soft);
    // The margin covers the rounding of the sums.
    const Softening part = restrict_to(s, top_p * s.total * (1 + 1e-6), soft);
    Candidates& c = buffers.candidates;
    collect(logits, part, NONE, c);
    const bool complete = part.smallest_x == soft.smallest_x;
    keep_top_p(c, top_p, complete ? total_weight(c) : s.total, buffers.select);
}

// Candidates among which are the k likeliest.
inline void collect_top_k(const Logits& logits, const Softening& soft, int32_t k, RowBuffers& buffers) {
    Candidates& c = buffers.candidates;
    if (k < logits.panels())
        collect(logits, soft, reached_by(logits, k, c, buffers.select), c);
    else
        collect(logits, restrict_to(survey<false>(logits, soft), k, soft), NONE, c);
    keep_top_k(c, k, buffers.select);
}

inline int32_t draw_candidate(const Candidates& c, double draw) {
    const double target = draw * total_weight(c);
    double cumulative = 0;
    int32_t i = 0;
    for (; i < c.count - 1; ++i) {
        cumulative += c.weights[i];
        if (cumulative > target) break;
    }
    return c.ids[i];
}

// Two rounds of the splitmix64 finalizer; see `uniform` in backends/sampling.py.
inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
inline double uniform(uint64_t seed, uint64_t counter) {
    const uint64_t step = 0x9E3779B97F4A7C15u;
    return static_cast<double>(mix(mix(seed + step) + (counter + 1) * step) >> 11) * 0x1p-53;
}

// Stages 3 to 5.
inline int32_t choose(const Logits& logits, const SamplingBatch& b, int32_t row, RowBuffers& buffers) {
    const float temperature = b.temperature[row], min_p = b.min_p[row];
    if (temperature <= 0) return largest_id(logits);
    Softening soft{logits.max, temperature, SMALLEST_X};
    if (min_p > 0) {
        const float x = static_cast<float>(__builtin_log(min_p < 1.0f ? static_cast<double>(min_p) : 1.0));
        soft.smallest_x = x > SMALLEST_X ? x : SMALLEST_X;
    }
    const double draw = uniform(b.seed[row], b.counter[row]);
    const bool top_k = b.top_k[row] > 0 && b.top_k[row] < logits.size;
    const bool typical = b.typical_p[row] < 1, top_p = b.top_p[row] < 1;
    if (!top_k && !typical && !top_p) return draw_from_all(logits, soft, draw, buffers.panel_sum);
    Candidates& c = buffers.candidates;
    if (!top_k && !typical) {
        collect_mass(logits, soft, b.top_p[row], buffers);
        return draw_candidate(c, draw);
    }
    if (top_k)
        collect_top_k(logits, soft, b.top_k[row], buffers);
    else
        collect(logits, soft, NONE, c);
    if (typical) keep_typical(c, b.typical_p[row], buffers.select);
    if (top_p) keep_top_p(c, b.top_p[row], total_weight(c), buffers.select);
    return draw_candidate(c, draw);
}

inline int32_t rank_of(const Logits& raw, int32_t token) {
    const float logit = raw.data[token];
    int32_t before = 0;
    for (int32_t i = 0; i < token; ++i) before += raw.data[i] >= logit;
    for (int32_t i = token + 1; i < raw.size; ++i) before += raw.data[i] > logit;
    return before + 1;
}

// Stage 0: the token's log-probability and rank, and the most likely tokens.
inline void report_logprobs(const Logits& raw, int32_t num_logprobs, int32_t row, RowBuffers& buffers,
                            const StepOutput& out) {
    const Softening plain{raw.max, 1.0f, SMALLEST_X};
    const double normalizer = static_cast<double>(raw.max) + __builtin_log(sum_weights(raw, plain, buffers.panel_sum));
    const int32_t token = out.token_ids[row];
    out.logprobs[row] = static_cast<float>(static_cast<double>(raw.data[token]) - normalizer);
    out.ranks[row] = rank_of(raw, token);
    if (num_logprobs <= 0) return;
    Candidates& c = buffers.candidates;
    const int32_t wanted = num_logprobs < raw.size ? num_logprobs : raw.size;
    collect_top_k(raw, {raw.max, 1.0f, NONE}, wanted, buffers);
    order_by_likelihood(c);
    for (int32_t i = 0; i < c.count; ++i) buffers.select.active[i] = i;
    sort_positions(c, buffers.select.active, c.count);
    const int64_t to = static_cast<int64_t>(row) * out.num_top;
    for (int32_t i = 0; i < c.count && i < out.num_top; ++i) {
        const int32_t from = buffers.select.active[i];
        out.top_ids[to + i] = c.ids[from];
        out.top_logprobs[to + i] = static_cast<float>(static_cast<double>(c.logits[from]) - normalizer);
    }
}

}  // namespace
}  // namespace octavo
