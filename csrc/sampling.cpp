#include "sampling.h"

namespace octavo {

// kernels/sample.cpp: six arrays of the vocabulary, for each panel of 256 two maxima and two sums; buckets and bins.
size_t sampling_scratch_bytes(int32_t vocab) {
    const size_t panels = (static_cast<size_t>(vocab) + 255) / 256;
    return panels * (256 * 6 * sizeof(float) + 2 * sizeof(float) + 2 * sizeof(double)) + (size_t{1} << 15);
}

void sample_rows(KernelFn sample_kernel, const SamplingTask& task, Worker& worker) {
    Args args{};
    args.shared_scratch = const_cast<SamplingTask*>(&task);
    sample_kernel(args, Step{}, worker);
}

}  // namespace octavo
