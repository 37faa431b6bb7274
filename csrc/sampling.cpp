#include "sampling.h"

#include <algorithm>

#include "sample_plan.h"

namespace octavo {

// kernels/sample_whole.h: six arrays of vocabulary size; two maxima and two sums for each panel of 256; buckets and
// bins.
size_t sampling_scratch_bytes(int32_t vocab) {
    const size_t panels = (static_cast<size_t>(vocab) + 255) / 256;
    return panels * (256 * 6 * sizeof(float) + 2 * sizeof(float) + 2 * sizeof(double)) + (size_t{1} << 15);
}

// kernels/sample_parts.cpp: two lists of logits and tokens.
size_t parts_scratch_bytes(int32_t vocab, int32_t num_ranks) {
    if (num_ranks == 1) return 0;
    const size_t most = std::min(static_cast<size_t>(vocab), static_cast<size_t>(MOST_CANDIDATES) * num_ranks);
    return 4 * (most * sizeof(float) + 64) + 64;
}

bool needs_all_logits(const SamplingBatch& batch, int32_t num_rows, const Exchange& exchange) {
    for (int32_t row = 0; row < num_rows; ++row)
        if (plan_row(batch, row, exchange).choices > 0) return false;
    return true;
}

void sample_rows(KernelFn sample_kernel, const SamplingTask& task, Worker& worker) {
    Args args{};
    args.shared_scratch = const_cast<SamplingTask*>(&task);
    sample_kernel(args, Step{}, worker);
}

void sample_parts(KernelFn sample_kernel, PartsTask& task, Worker& worker) {
    Args args{};
    args.shared_scratch = &task;
    sample_kernel(args, Step{}, worker);
}

}  // namespace octavo
