#include "sampling.h"

namespace octavo {

// kernels/sample.cpp: seven arrays of the vocabulary, and for each panel of 256 two maxima and a sum; buckets.
size_t sampling_scratch_bytes(int32_t vocab) {
    const size_t panels = (static_cast<size_t>(vocab) + 255) / 256;
    return panels * (256 * 7 * sizeof(float) + 2 * sizeof(float) + sizeof(double)) + (size_t{1} << 14);
}

void sample_rows(KernelFn sample_kernel, const SamplingTask& task, Worker& worker) {
    Args args{};
    args.shared_scratch = const_cast<SamplingTask*>(&task);
    sample_kernel(args, Step{}, worker);
}

}  // namespace octavo
