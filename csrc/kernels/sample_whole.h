// Samples a row with logits for the whole vocabulary: its memory, result and errors.
#pragma once

#include "sample_filter.h"

namespace octavo {
namespace {

// The candidates take four arrays of `vocab` elements; the weights and the changed logits take one each.
inline RowBuffers carve_row_buffers(char* base, int32_t vocab) {
    const size_t size = (static_cast<size_t>(vocab) + PANEL - 1) / PANEL * PANEL, panels = size / PANEL;
    size_t used = 0;
    const auto take = [&](size_t bytes) {
        char* piece = base + used;
        used += (bytes + 63) / 64 * 64;
        return piece;
    };
    RowBuffers b{};
    b.changed = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.weights = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.raw_max = reinterpret_cast<float*>(take(panels * sizeof(float)));
    b.changed_max = reinterpret_cast<float*>(take(panels * sizeof(float)));
    for (double*& sums : b.panel_sums) sums = reinterpret_cast<double*>(take(panels * sizeof(double)));
    b.bins.counts = reinterpret_cast<uint32_t*>(take((NUM_BINS + 1) * sizeof(uint32_t)));
    b.bins.weights = reinterpret_cast<float*>(take(NUM_BINS * sizeof(float)));
    b.candidates.ids = reinterpret_cast<int32_t*>(take(size * sizeof(int32_t)));
    b.candidates.weights = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.candidates.keys = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.select.active = reinterpret_cast<int32_t*>(take(size * sizeof(int32_t)));
    b.select.masses = reinterpret_cast<double*>(take(NUM_BUCKETS * sizeof(double)));
    b.select.counts = reinterpret_cast<int32_t*>(take(NUM_BUCKETS * sizeof(int32_t)));
    return b;
}

inline void clear_outputs(const StepOutput& out, int32_t row) {
    out.token_ids[row] = 0;
    out.logprobs[row] = __builtin_nanf("");
    out.ranks[row] = 0;
    for (int32_t i = 0; i < out.num_top; ++i) {
        out.top_ids[static_cast<int64_t>(row) * out.num_top + i] = -1;
        out.top_logprobs[static_cast<int64_t>(row) * out.num_top + i] = __builtin_nanf("");
    }
}

inline bool ids_are_known(const SamplingBatch& b, int32_t row, int32_t vocab) {
    return b.rows[row].target < vocab &&
           ids_in_range(b.history_ids, b.history_start[row], b.history_start[row + 1], vocab) &&
           ids_in_range(b.bias_ids, b.bias_start[row], b.bias_start[row + 1], vocab);
}

// `mass_of` at temperature 1, summed in the same way as from the ranks' offers, so that a row's log-probabilities have
// the same bits whether its logits were gathered or not. Overwrites the maxima buffer that `raw` does not use.
inline double whole_mass(const Logits& raw, const Exchange* exchange, RowBuffers& buffers) {
    if (!exchange) return mass_of(raw, 1.0f, buffers);
    float* const maxima = raw.panel_max == buffers.raw_max ? buffers.changed_max : buffers.raw_max;
    double sum = 0;
    for (int32_t rank = 0, begin = 0; rank < exchange->size; ++rank) {
        Logits part{raw.data + begin, exchange->columns[rank], 0, 0, maxima};
        if (part.size < 0 || part.size > raw.size - begin) break;  // sent by another program
        scan(part);
        const double own = mass_of(part, 1.0f, buffers);
        if (own > 0) sum += own * __builtin_exp(static_cast<double>(part.max - raw.max) / 1.0f);
        begin += part.size;
    }
    return sum;
}

inline RowError sample_row(const SamplingTask& task, int32_t row, RowBuffers& buffers) {
    const SamplingBatch& b = task.batch;
    const int32_t vocab = task.vocab;
    if (!ids_are_known(b, row, vocab)) return ROW_TOKEN_ID_OUT_OF_RANGE;
    Logits raw{task.logits + static_cast<int64_t>(row - task.first_row) * vocab, vocab, 0, 0, buffers.raw_max};
    Logits changed{buffers.changed, vocab, 0, 0, buffers.changed_max};
    int32_t& token = task.output.token_ids[row];
    const bool changes = b.rows[row].target < 0 && changes_logits(b, row), reports = b.rows[row].num_logprobs >= 0;
    if (changes) {
        if (!copy_allowed(raw, allowed_words(b, row, vocab), buffers.changed, changed)) return ROW_NAN_LOGITS;
        change_logits(b, row, 0, vocab, buffers.changed, changed);
        update_maxima(changed);
        if (changed.max == NONE) return ROW_NOTHING_ALLOWED;
        token = choose(changed, b, row, buffers);
        if (!reports) return ROW_OK;
    }
    if (!scan(raw)) return ROW_NAN_LOGITS;
    if (raw.max == NONE) return ROW_NOTHING_ALLOWED;
    if (raw.max > LARGEST) {
        copy_allowed(raw, nullptr, buffers.changed, changed);
        update_maxima(changed);
        raw = changed;
    }
    if (!changes) token = b.rows[row].target < 0 ? choose(raw, b, row, buffers) : b.rows[row].target;
    if (reports)
        report_logprobs(raw, nullptr, token, whole_mass(raw, task.exchange, buffers), b.rows[row].num_logprobs, row,
                        buffers, task.output);
    return ROW_OK;
}

}  // namespace
}  // namespace octavo
