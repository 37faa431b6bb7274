// Sampling: each row of logits becomes a token. Rows are shared out among the workers.
#include "sample_filter.h"

namespace octavo {
namespace {

// The candidates take six arrays of `vocab`, the changed logits one.
RowBuffers carve_row_buffers(char* base, int32_t vocab) {
    const size_t size = (static_cast<size_t>(vocab) + PANEL - 1) / PANEL * PANEL, panels = size / PANEL;
    size_t used = 0;
    const auto take = [&](size_t bytes) {
        char* piece = base + used;
        used += (bytes + 63) / 64 * 64;
        return piece;
    };
    RowBuffers b{};
    b.changed = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.raw_max = reinterpret_cast<float*>(take(panels * sizeof(float)));
    b.changed_max = reinterpret_cast<float*>(take(panels * sizeof(float)));
    b.panel_sum = reinterpret_cast<double*>(take(panels * sizeof(double)));
    b.candidates.ids = reinterpret_cast<int32_t*>(take(size * sizeof(int32_t)));
    b.candidates.logits = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.candidates.x = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.candidates.weights = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.candidates.keys = reinterpret_cast<float*>(take(size * sizeof(float)));
    b.select.active = reinterpret_cast<int32_t*>(take(size * sizeof(int32_t)));
    b.select.masses = reinterpret_cast<double*>(take(NUM_BUCKETS * sizeof(double)));
    b.select.counts = reinterpret_cast<int32_t*>(take(NUM_BUCKETS * sizeof(int32_t)));
    return b;
}

void clear_outputs(const StepOutput& out, int32_t row) {
    out.token_ids[row] = 0;
    out.logprobs[row] = __builtin_nanf("");
    out.ranks[row] = 0;
    for (int32_t i = 0; i < out.num_top; ++i) {
        out.top_ids[static_cast<int64_t>(row) * out.num_top + i] = -1;
        out.top_logprobs[static_cast<int64_t>(row) * out.num_top + i] = __builtin_nanf("");
    }
}

// A copy in which +inf is the largest finite number.
Logits saturated_copy(const Logits& from, float* to, float* panel_max) {
    for (int32_t i = 0; i < from.size; ++i) to[i] = from.data[i] < LARGEST ? from.data[i] : LARGEST;
    Logits copy{to, from.size, 0, panel_max};
    scan(copy);
    return copy;
}

RowError sample_row(const SamplingTask& task, int32_t row, RowBuffers& buffers) {
    const SamplingBatch& b = task.batch;
    const int32_t vocab = task.vocab, target = b.target[row];
    if (target >= vocab || !ids_in_range(b.history_ids, b.history_start[row], b.history_start[row + 1], vocab) ||
        !ids_in_range(b.bias_ids, b.bias_start[row], b.bias_start[row + 1], vocab))
        return ROW_TOKEN_ID_OUT_OF_RANGE;
    Logits raw{task.logits + static_cast<int64_t>(row) * vocab, vocab, 0, buffers.raw_max};
    if (!scan(raw)) return ROW_NAN_LOGITS;
    if (raw.max == NONE) return ROW_NOTHING_ALLOWED;
    int32_t token = target;
    if (target < 0 && (changes_logits(b, row) || raw.max > LARGEST)) {
        Logits changed = saturated_copy(raw, buffers.changed, buffers.changed_max);
        change_logits(b, row, vocab, buffers.changed);
        scan(changed);
        if (changed.max == NONE) return ROW_NOTHING_ALLOWED;
        token = choose(changed, b, row, buffers);
    } else if (target < 0) {
        token = choose(raw, b, row, buffers);
    }
    task.output.token_ids[row] = token;
    if (b.num_logprobs[row] < 0) return ROW_OK;
    const bool infinite = raw.max > LARGEST;
    report_logprobs(infinite ? saturated_copy(raw, buffers.changed, buffers.changed_max) : raw, b.num_logprobs[row],
                    row, buffers, task.output);
    return ROW_OK;
}

// The task lies where other kernels have their shared scratch.
void sample(const Args& args, const Step&, Worker& worker) {
    const SamplingTask& task = *static_cast<const SamplingTask*>(args.shared_scratch);
    RowBuffers buffers = carve_row_buffers(static_cast<char*>(worker.scratch), task.vocab);
    for (int32_t row = worker.index; row < task.num_rows; row += worker.count) {
        clear_outputs(task.output, row);
        task.output.errors[row] = sample_row(task, row, buffers);
    }
}

}  // namespace

OCTAVO_KERNEL(sample);

}  // namespace octavo
