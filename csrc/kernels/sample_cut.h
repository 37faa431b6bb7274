// Decides where a filter cuts. A histogram of x gives an approximate position. One pass then sums up everything before
// it, and examines the tokens around it exactly. A wrong guess costs another pass, but does not change the result.
#pragma once

#include "sample_weights.h"

namespace octavo {
namespace {

constexpr int32_t NUM_BINS = 2048;

// Memory for a histogram.
struct BinTables {
    uint32_t* counts;  // [NUM_BINS + 1]; the last one counts tokens with weight zero
    float* weights;    // [NUM_BINS]; the weight of a token in the middle of each bin
};

// One worker's memory for rows of `vocab` logits.
struct RowBuffers {
    float* changed;                // logits with bias, mask and penalties
    float *raw_max, *changed_max;  // per panel
    float* weights;
    double* panel_sums[2];
    BinTables bins;
    Candidates candidates;
    SelectBuffers select;
};

inline Weights make_weights(const Logits& logits, const Softening& soft, const RowBuffers& b) {
    return {&logits, soft, b.weights, b.panel_sums[0], b.panel_sums[1]};
}

// Sorts by decreasing likelihood.
inline float likelihood_key(float logit) { return logit > -LARGEST ? -logit : LARGEST; }

// Orders tokens by the distance of x from a reference, nearest first: 0 to sort by likelihood, the mean to sort by
// typicality.
struct Order {
    bool typical;
    float mean;

    F32x16 distance(F32x16 x) const { return typical ? abs(x - broadcast(mean)) : broadcast(0.0f) - x; }
    // Whether every x up to `largest_x` is farther away than `far`.
    bool is_behind(float largest_x, float far) const { return !typical && -largest_x > far; }
    // The sort key. By likelihood it is the logit itself, which also separates tokens with the same x.
    float key(float logit, const Softening& soft) const {
        return typical ? __builtin_fabsf(soft.x_of(logit) - mean) : likelihood_key(logit);
    }
};

// Distances from `near` to `far`, inclusive.
struct Window {
    float near, far;
    void widen_behind() { *this = {far, far + 4 * (far - near)}; }
    void widen_before() { *this = {near - 4 * (far - near), near}; }
};

// A histogram of the tokens by x.
class Histogram {
  public:
    // negligible: tokens of at most this weight may be left out.
    Histogram(const Weights& w, const BinTables& tables, float negligible) : tables_(tables) {
        const float lowest = w.soft.x_of(w.logits->min);
        reach_ = 0.0f - (lowest > w.soft.smallest_x ? lowest : w.soft.smallest_x);
        scale_ = (NUM_BINS - 1) / reach_;
        if (!(scale_ <= 1e30f)) scale_ = 1e30f;  // all x are equal, or nearly so
        count(w, negligible);
        weigh_bins();
    }

    // The number of tokens with nonzero weight.
    double total() const {
        double sum = 0;
        for (int32_t b = 0; b < NUM_BINS; ++b) sum += tables_.counts[b];
        return sum;
    }

    // Estimates where the first `target` tokens end in the order, or (by_mass) the first tokens with that mass.
    Window guess(const Order& order, bool by_mass, double target) const {
        const int32_t center = center_of(order);
        double sum = 0;
        int32_t last_filled = 0;
        for (int32_t t = 0; t < NUM_BINS && sum < target; ++t) {
            double here = center - t >= 0 ? share(center - t, by_mass) : 0;
            here += t > 0 && center + t < NUM_BINS ? share(center + t, by_mass) : 0;
            sum += here;
            last_filled = here > 0 ? t : last_filled;
        }
        // A bin is one unit wide. For typical order, its center may be another half unit from the mean.
        const float width = order.typical ? 1.5f : 1.0f, at = static_cast<float>(last_filled);
        return {(at - width) / scale_, (at + width) / scale_};
    }
    // Drops the bins that are beyond the window.
    void cut(const Order& order, const Window& window) {
        const int32_t center = center_of(order), last = static_cast<int32_t>(window.far * scale_);
        for (int32_t b = 0; b < NUM_BINS; ++b)
            if (b > center + last || b < center - last) tables_.counts[b] = 0;
    }
    // No two x are farther apart than this.
    float reach() const { return reach_; }

  private:
    static constexpr float BASE = 8388608.0f;  // 2^23: adding it leaves the nearest integer in the low bits

    int32_t center_of(const Order& order) const {
        return order.typical ? static_cast<int32_t>(-order.mean * scale_ + 0.5f) : 0;
    }
    double share(int32_t bin, bool by_mass) const {
        return by_mass ? static_cast<double>(tables_.weights[bin]) * tables_.counts[bin] : tables_.counts[bin];
    }

    void count(const Weights& w, float negligible) {
        __builtin_memset(tables_.counts, 0, sizeof(uint32_t) * (NUM_BINS + 1));
        const F32x16 nowhere = broadcast(BASE + NUM_BINS), last = broadcast(BASE + (NUM_BINS - 1));
        for (int32_t p = 0; p < w.logits->panels(); ++p) {
            if (!(w.panel_sum[p] > negligible)) continue;
            each_group(*w.logits, p, [&](int32_t i, F32x16 lanes) {
                const F32x16 weights = load(w.weight + i);
                if (greater_bits(weights, broadcast(negligible)) == 0) return;
                const F32x16 bins = min(fma(w.soft.x_of(lanes), broadcast(-scale_), broadcast(BASE)), last);
                float at[16];
                store(at, select_greater(weights, broadcast(0.0f), bins, nowhere));
                uint32_t bits[16];
                __builtin_memcpy(bits, at, sizeof(bits));
                for (int lane = 0; lane < 16; ++lane) ++tables_.counts[bits[lane] & 0xffffu];
            });
        }
    }
    void weigh_bins() {
        for (int32_t b = 0; b < NUM_BINS; b += 16) {
            float x[16];
            for (int lane = 0; lane < 16; ++lane) x[lane] = static_cast<float>(b + lane) / -scale_;
            store(tables_.weights + b, exp(load(x)));
        }
    }

    BinTables tables_;
    float reach_, scale_;
};

// Totals before and inside a window, from one pass. The tokens inside become candidates.
struct Front {
    double before;  // mass, or number of tokens
    double inside;
};

// Stores each panel's sum of the weights before the window in `sums`.
template <bool by_mass>
inline Front look_around(const Weights& w, const Order& order, const Window& window, double* sums, Candidates& c) {
    const F32x16 near = broadcast(window.near), far = broadcast(window.far), zero = broadcast(0.0f);
    Front front{};
    c.count = 0;
    for (int32_t p = 0; p < w.logits->panels(); ++p) {
        sums[p] = 0;
        if (w.is_empty(p) || order.is_behind(w.soft.x_of(w.logits->panel_max[p]), window.far)) continue;
        F32x16 sum = zero, tokens = zero;
        each_group(*w.logits, p, [&](int32_t i, F32x16 lanes) {
            const F32x16 distance = order.distance(w.soft.x_of(lanes));
            const F32x16 kept = select_greater(near, distance, load(w.weight + i), zero);
            sum = sum + kept;
            if (!by_mass) tokens = tokens + select_greater(kept, zero, broadcast(1.0f), zero);
            uint32_t inside = ~(greater_bits(near, distance) | greater_bits(distance, far)) & 0xffffu;
            for (; inside != 0; inside &= inside - 1) {
                const int32_t id = i + __builtin_ctz(inside);
                if (w.weight[id] == 0) continue;
                c.ids[c.count] = id;
                c.weights[c.count] = w.weight[id];
                c.keys[c.count++] = order.key(w.logits->data[id], w.soft);
                front.inside += by_mass ? w.weight[id] : 1.0;
            }
        });
        sums[p] = reduce_add(sum);
        front.before += by_mass ? sums[p] : reduce_add(tokens);
    }
    return front;
}

// The last cut. Its panel sums are final, but the weights are not updated yet, since a draw needs only one panel's.
class Cut {
  public:
    Cut() = default;
    Cut(const Order& order, float near, const Candidates& kept)
        : pending_(true), order_(order), near_(near), kept_(&kept) {}

    void apply(Weights& w, int32_t panel) const {
        if (!pending_) return;
        drop(w, panel);
        for (int32_t i = 0; i < kept_->count; ++i)
            if (kept_->ids[i] / PANEL == panel) w.weight[kept_->ids[i]] = kept_->weights[i];
    }
    void apply(Weights& w) {
        if (!pending_) return;
        for (int32_t p = 0; p < w.logits->panels(); ++p)
            if (!w.is_empty(p)) drop(w, p);
        for (int32_t i = 0; i < kept_->count; ++i) w.weight[kept_->ids[i]] = kept_->weights[i];
        pending_ = false;
    }

  private:
    // Drops everything from near_ on.
    void drop(Weights& w, int32_t panel) const {
        each_group(*w.logits, panel, [&](int32_t i, F32x16 lanes) {
            const F32x16 distance = order_.distance(w.soft.x_of(lanes));
            store(w.weight + i, select_greater(broadcast(near_), distance, load(w.weight + i), broadcast(0.0f)));
        });
    }

    bool pending_ = false;
    Order order_{};
    float near_ = 0;
    const Candidates* kept_ = nullptr;  // candidates to keep in addition
};

// Keeps the shortest prefix of the order whose mass is at least `target` (by_mass), or the first `target` tokens, of
// which there are more.
template <bool by_mass>
inline void keep_prefix(Weights& w, Histogram& histogram, const Order& order, double target, Window window, Cut& cut,
                        RowBuffers& buffers) {
    Candidates& c = buffers.candidates;
    cut.apply(w);
    for (;;) {
        const Front front = look_around<by_mass>(w, order, window, w.next_sum, c);
        if (front.before >= target && window.near > 0) {
            window.widen_before();
        } else if (front.before + front.inside < target && window.far < histogram.reach()) {
            window.widen_behind();
        } else {
            keep_until(c, find_border(c, by_mass, target - front.before, buffers.select));
            break;
        }
    }
    histogram.cut(order, window);
    w.advance();
    for (int32_t i = 0; i < c.count; ++i) w.panel_sum[c.ids[i] / PANEL] += c.weights[i];
    cut = Cut(order, window.near, c);
}

inline void keep_top_k(Weights& w, Histogram& histogram, int32_t k, Cut& cut, RowBuffers& buffers) {
    const Order order{};
    if (histogram.total() <= k) return;
    keep_prefix<false>(w, histogram, order, k, histogram.guess(order, false, k), cut, buffers);
}

inline void keep_mass(Weights& w, Histogram& histogram, const Order& order, double target, Cut& cut,
                      RowBuffers& buffers) {
    keep_prefix<true>(w, histogram, order, target, histogram.guess(order, true, target), cut, buffers);
}

}  // namespace
}  // namespace octavo
