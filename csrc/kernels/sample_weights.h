// The weights of a row's tokens under a temperature, and the draw among them. Filtered tokens have weight zero.
#pragma once

#include "sample_row.h"

namespace octavo {
namespace {

constexpr float SMALLEST_X = -87.0f;

// x and weights of logits under one temperature.
struct Softening {
    float max, temperature, smallest_x;

    F32x16 x_of(F32x16 logits) const {
        const F32x16 below_max = logits - broadcast(max);
        return temperature == 1.0f ? below_max : below_max / broadcast(temperature);
    }
    float x_of(float logit) const { return (logit - max) / temperature; }
    F32x16 weight_of(F32x16 x) const { return select_greater(broadcast(smallest_x), x, broadcast(0.0f), exp(x)); }
};

// Weights by id. A panel whose sum is 0 is not filled in.
struct Weights {
    const Logits* logits;
    Softening soft;
    float* weight;
    double *panel_sum, *next_sum;  // next_sum: for the result of a filter

    void advance() {
        double* const sums = panel_sum;
        panel_sum = next_sum;
        next_sum = sums;
    }
    bool is_empty(int32_t panel) const { return panel_sum[panel] == 0; }
    double total() const {
        double sum = 0;
        for (int32_t p = 0; p < logits->panels(); ++p) sum += panel_sum[p];
        return sum;
    }
};

// Calls f(i, logits) for each 16 ids of a panel; lanes beyond the row are -inf.
template <typename F>
inline void each_group(const Logits& logits, int32_t panel, F f) {
    const int32_t end = logits.panel_end(panel);
    int32_t i = panel * PANEL;
    for (; i + 16 <= end; i += 16) {
        prefetch(logits.data + i);
        f(i, load(logits.data + i));
    }
    if (i < end) f(i, load_partial(logits.data + i, end - i, NONE));
}

// Computes the weights of all tokens whose logit is at least `least`.
inline void weigh(Weights& w, float least) {
    for (int32_t p = 0; p < w.logits->panels(); ++p) {
        const float largest = w.logits->panel_max[p];
        w.panel_sum[p] = 0;
        if (largest < least || !(w.soft.x_of(largest) >= w.soft.smallest_x)) continue;
        F32x16 sum = broadcast(0.0f);
        each_group(*w.logits, p, [&](int32_t i, F32x16 lanes) {
            const F32x16 weights =
                select_greater(broadcast(least), lanes, broadcast(0.0f), w.soft.weight_of(w.soft.x_of(lanes)));
            store(w.weight + i, weights);  // rows are padded to whole panels
            sum = sum + weights;
        });
        w.panel_sum[p] = reduce_add(sum);
    }
}

// The mean of x, by weight.
inline float mean_x(const Weights& w) {
    double weighted = 0;
    for (int32_t p = 0; p < w.logits->panels(); ++p) {
        if (w.is_empty(p)) continue;
        F32x16 sum = broadcast(0.0f);
        each_group(*w.logits, p, [&](int32_t i, F32x16 lanes) {
            sum = fma(load(w.weight + i), max(w.soft.x_of(lanes), broadcast(SMALLEST_X)), sum);
        });
        weighted += reduce_add(sum);
    }
    return static_cast<float>(weighted / w.total());
}

// The panel in which the cumulative weight exceeds `target` = draw * total, and the weight `before` it.
struct Place {
    int32_t panel;
    double before, target;
};
inline Place draw_panel(const Weights& w, double draw) {
    Place place{0, 0, draw * w.total()};
    double cumulative = 0;
    for (int32_t p = 0; p < w.logits->panels() && cumulative <= place.target; ++p) {
        if (w.is_empty(p)) continue;
        place.panel = p;
        place.before = cumulative;
        cumulative += w.panel_sum[p];
    }
    return place;
}

// Draws a token of that panel. If rounding moves the target past its end, returns the last token with nonzero weight.
inline int32_t draw_token(const Weights& w, Place place) {
    int32_t chosen = 0;
    for (int32_t i = place.panel * PANEL; i < w.logits->panel_end(place.panel) && place.before <= place.target; ++i) {
        if (w.weight[i] == 0) continue;
        place.before += w.weight[i];
        chosen = i;
    }
    return chosen;
}

}  // namespace
}  // namespace octavo
