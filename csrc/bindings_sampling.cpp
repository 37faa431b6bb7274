// Sampling on its own, for tests: what the executor does after the last record of a step.
#include <nanobind/stl/string.h>

#include "bindings_step.h"
#include "isa.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// `num_workers` take their rows one after another on the calling thread.
void sample_batch(const std::string& isa, Array<float, 2> logits, nb::handle sampling, nb::handle output,
                  nb::handle errors, int num_workers) {
    const size_t rows = logits.shape(0);
    const int32_t vocab = static_cast<int32_t>(logits.shape(1));
    const SamplingArrays arrays(sampling, rows, vocab);
    const SamplingTask task{logits.data(), static_cast<int32_t>(rows), vocab, arrays.batch(),
                            read_step_output(output, errors, rows)};
    const KernelFn kernel = find_kernel("sample", parse_isa(isa))->run;
    const Memory scratch(sampling_scratch_bytes(vocab));
    const nb::gil_scoped_release release;
    for (int index = 0; index < num_workers; ++index) {
        Worker worker{};
        worker.index = index;
        worker.count = num_workers;
        worker.scratch = scratch.data();
        worker.scratch_bytes = scratch.size();
        sample_rows(kernel, task, worker);
    }
}

}  // namespace

void bind_sampling(nb::module_& module) {
    module.def("sample", &sample_batch, "isa"_a, "logits"_a, "sampling"_a, "output"_a, "errors"_a, "num_workers"_a = 1);
}

}  // namespace octavo
