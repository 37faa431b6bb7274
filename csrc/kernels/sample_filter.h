// The filters of a row (min-p, top-k, typical, top-p), the draw, and the reported log-probabilities.
#pragma once

#include "sample_cut.h"

namespace octavo {
namespace {

// A logit that at least k logits reach: the k-th largest of the panel maxima. There are more than k panels.
inline float reached_by(const Logits& logits, int32_t k, Candidates& c, const SelectBuffers& buffers) {
    c.count = logits.panels();
    for (int32_t p = 0; p < c.count; ++p) {
        c.ids[p] = p;
        c.keys[p] = likelihood_key(logits.panel_max[p]);
    }
    const float border = -find_border(c, false, k, buffers).key;
    return border > -LARGEST ? border : NONE;
}

constexpr double TOP_P_MARGIN = 1.000001;  // sums of parts round differently from the sum of the whole

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

// Stages 3 to 5: returns the index of the token among the logits. mass: if the logits are only the most likely ones,
// and top-p is the only filter, the total weight of all tokens; 0 if the logits are complete. Returns -1 if top-p would
// keep more tokens than these.
inline int32_t choose(const Logits& logits, const SamplingBatch& b, int32_t row, RowBuffers& buffers, double mass = 0) {
    const float temperature = b.rows[row].temperature, min_p = b.rows[row].min_p;
    if (temperature <= 0) return largest_id(logits);
    Softening soft{logits.max, temperature, SMALLEST_X};
    if (min_p > 0) {
        const float x = static_cast<float>(__builtin_log(min_p < 1.0f ? static_cast<double>(min_p) : 1.0));
        soft.smallest_x = x > SMALLEST_X ? x : SMALLEST_X;
    }
    Weights w = make_weights(logits, soft, buffers);
    const int32_t k = b.rows[row].top_k > 0 && b.rows[row].top_k < logits.size ? b.rows[row].top_k : 0;
    weigh(w, 0 < k && k < logits.panels() ? reached_by(logits, k, buffers.candidates, buffers.select) : NONE);
    const bool typical = b.rows[row].typical_p < 1, top_p = b.rows[row].top_p < 1;
    Cut cut;
    if (k > 0 || typical || top_p) {
        // Tokens with negligible weight have less mass together than top-p drops.
        const bool only_top_p = k == 0 && !typical && mass == 0;
        if (mass > 0 && w.total() < TOP_P_MARGIN * b.rows[row].top_p * mass) return -1;
        const double negligible = only_top_p ? 0.999 * (1.0 - b.rows[row].top_p) * w.total() / logits.size : 0.0;
        Histogram histogram(w, buffers.bins, static_cast<float>(negligible));
        if (k > 0) keep_top_k(w, histogram, k, cut, buffers);
        if (typical) {
            cut.apply(w);
            keep_mass(w, histogram, {true, mean_x(w)}, b.rows[row].typical_p * w.total(), cut, buffers);
        }
        if (top_p) keep_mass(w, histogram, Order{}, b.rows[row].top_p * (mass > 0 ? mass : w.total()), cut, buffers);
    }
    const Place place = draw_panel(w, uniform(b.rows[row].seed, b.rows[row].counter));
    cut.apply(w, place.panel);
    return draw_token(w, place);
}

// One plus the number of logits that precede a token.
inline int32_t rank_of(const Logits& raw, int32_t at) {
    const float logit = raw.data[at];
    int32_t before = 0;
    for (int32_t i = 0; i < at; ++i) before += raw.data[i] >= logit;
    for (int32_t i = at + 1; i < raw.size; ++i) before += raw.data[i] > logit;
    return before + 1;
}

// The k most likely of all tokens, including impossible ones, by ascending id.
inline void collect_likeliest(const Logits& logits, int32_t k, RowBuffers& buffers) {
    Candidates& c = buffers.candidates;
    const float least = k < logits.panels() ? reached_by(logits, k, c, buffers.select) : NONE;
    c.count = 0;
    for (int32_t p = 0; p < logits.panels(); ++p) {
        if (logits.panel_max[p] < least) continue;
        for (int32_t i = p * PANEL; i < logits.panel_end(p); ++i) {
            if (logits.data[i] < least) continue;
            c.ids[c.count] = i;
            c.weights[c.count] = 0;
            c.keys[c.count++] = likelihood_key(logits.data[i]);
        }
    }
    if (c.count > k) keep_until(c, find_border(c, false, k, buffers.select));
}

// The sum of exp((logit - largest) / temperature); 0 if no token is possible.
inline double mass_of(const Logits& logits, float temperature, RowBuffers& buffers) {
    if (logits.max == NONE) return 0;
    Weights all = make_weights(logits, {logits.max, temperature, SMALLEST_X}, buffers);
    weigh(all, NONE);
    return all.total();
}

// Stage 0: the token's log-probability and rank, and the most likely tokens. token: its index in `raw`. mass: see
// `mass_of`. ids: of the tokens in `raw`, ascending; null: their indices.
inline void report_logprobs(const Logits& raw, const int32_t* ids, int32_t token, double mass, int32_t num_logprobs,
                            int32_t row, RowBuffers& buffers, const StepOutput& out) {
    const double normalizer = static_cast<double>(raw.max) + __builtin_log(mass);
    const auto logprob_of = [&](int32_t at) { return static_cast<float>(raw.data[at] - normalizer); };
    out.logprobs[row] = logprob_of(token);
    out.ranks[row] = rank_of(raw, token);
    if (num_logprobs <= 0) return;
    Candidates& c = buffers.candidates;
    collect_likeliest(raw, num_logprobs < raw.size ? num_logprobs : raw.size, buffers);
    for (int32_t i = 0; i < c.count; ++i) buffers.select.active[i] = i;
    sort_positions(c, buffers.select.active, c.count);
    const int64_t to = static_cast<int64_t>(row) * out.num_top;
    for (int32_t i = 0; i < c.count && i < out.num_top; ++i) {
        const int32_t at = c.ids[buffers.select.active[i]];
        out.top_ids[to + i] = ids ? ids[at] : at;
        out.top_logprobs[to + i] = logprob_of(at);
    }
}

}  // namespace
}  // namespace octavo
