// Decides which rows of logits can be sampled from the best candidates of each rank, and how many candidates are
// needed. All ranks of a group see the same options and therefore decide alike.
#pragma once

#include "exchange.h"
#include "sampling.h"

namespace octavo {
namespace {

constexpr int32_t MOST_CANDIDATES = 256;  // per rank and row
constexpr int32_t RAW_CANDIDATES = 32;    // from the unchanged logits, to find the rank of the token among them

// What a rank offers for one row, followed by its candidates: the logits of each list, then their tokens.
struct RowOffer {
    int32_t error;
    int32_t part;                      // number of logits on this rank
    int32_t num_choices, num_reports;  // numbers of candidates
    float choice_max, report_max;      // maximum logit after and before bias, mask and penalties
    double choice_mass, report_mass;   // total weight on this rank, relative to its own maximum
};

// choices: candidates for the draw; 0: the row needs all logits. reports: candidates from the unchanged logits, if they
// differ. by_mass: the draw needs the total weight. is_certain: the candidates suffice for any logits.
struct RowPlan {
    int32_t choices, reports;
    bool by_mass, is_certain;
    size_t bytes() const { return sizeof(RowOffer) + 8 * static_cast<size_t>(choices + reports); }
};

inline bool changes_logits(const SamplingBatch& b, int32_t row) {
    const bool penalties = b.rows[row].repetition_penalty != 1.0f || b.rows[row].presence_penalty != 0.0f ||
                           b.rows[row].frequency_penalty != 0.0f;
    return b.allowed_mask || b.bias_start[row + 1] > b.bias_start[row] ||
           (penalties && b.history_start[row + 1] > b.history_start[row]);
}

// Whether so few tokens can be drawn that each rank can offer all of its own.
inline bool is_bounded(const SamplingRow& options) {
    return options.temperature <= 0 || (options.top_k > 0 && options.top_k <= MOST_CANDIDATES);
}

inline RowPlan plan_row(const SamplingBatch& b, int32_t row, const Exchange& exchange) {
    const SamplingRow& options = b.rows[row];
    RowPlan plan{};
    if (options.target >= 0 || options.num_logprobs > MOST_CANDIDATES) return plan;
    if (is_bounded(options)) {
        plan.choices = options.temperature <= 0 ? 1 : options.top_k;
        plan.is_certain = true;
    } else if (options.min_p > 0 || (options.top_p < 1 && options.top_k <= 0 && options.typical_p >= 1)) {
        plan.choices = MOST_CANDIDATES;
        plan.by_mass = !(options.min_p > 0);
    } else {
        return plan;
    }
    if (options.num_logprobs >= 0 && changes_logits(b, row)) {
        plan.reports = options.num_logprobs > RAW_CANDIDATES ? options.num_logprobs : RAW_CANDIDATES;
        plan.is_certain = false;
    } else if (options.num_logprobs > plan.choices) {
        plan.choices = options.num_logprobs;
    }
    return plan.bytes() <= exchange.bytes ? plan : RowPlan{};
}

}  // namespace
}  // namespace octavo
