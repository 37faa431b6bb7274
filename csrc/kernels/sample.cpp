// Sampling: turns each row of logits into a token. The workers share the rows.
#include "sample_whole.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Sample, (), (), (), ());

// The task is passed in place of the shared scratch of other kernels.
void sample(const Args& args, const Step&, Worker& worker) {
    const SamplingTask& task = *static_cast<const SamplingTask*>(args.shared_scratch);
    RowBuffers buffers = carve_row_buffers(static_cast<char*>(worker.scratch), task.vocab);
    for (int32_t row = task.first_row + worker.index; row < task.end_row; row += worker.count) {
        clear_outputs(task.output, row);
        task.output.errors[row] = sample_row(task, row, buffers);
    }
}

// The executor calls it after the last record; it is not itself a record.
bool sample_fits(const Args&) { return false; }

}  // namespace

OCTAVO_KERNEL(sample, Sample);

}  // namespace octavo
