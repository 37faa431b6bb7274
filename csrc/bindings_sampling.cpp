// Sampling on its own, for tests and benchmarks: what the executor does after the last record of a step.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "bindings_step.h"
#include "isa.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Scratch = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// `num_workers` take their rows one after another on the calling thread. scratch: aligned to 64 bytes.
void sample_batch(const std::string& isa, Array<float, 2> logits, nb::handle sampling, nb::handle output,
                  nb::handle errors, int num_workers, const std::optional<Scratch>& scratch) {
    const size_t rows = logits.shape(0);
    const int32_t vocab = static_cast<int32_t>(logits.shape(1));
    const SamplingArrays arrays(sampling, rows, vocab);
    const SamplingTask task{
        logits.data(), 0, static_cast<int32_t>(rows), vocab, arrays.batch(), read_step_output(output, errors, rows)};
    const KernelFn kernel = find_kernel("sample", parse_isa(isa))->run;
    const size_t bytes = sampling_scratch_bytes(vocab);
    if (scratch && (scratch->shape(0) < bytes || reinterpret_cast<uintptr_t>(scratch->data()) % 64 != 0))
        throw nb::value_error(("the scratch must be " + std::to_string(bytes) + " bytes, aligned to 64").c_str());
    const Memory own(scratch ? 0 : bytes);
    const nb::gil_scoped_release release;
    for (int index = 0; index < num_workers; ++index) {
        Worker worker{};
        worker.index = index;
        worker.count = num_workers;
        worker.scratch = scratch ? scratch->data() : reinterpret_cast<uint8_t*>(own.data());
        worker.scratch_bytes = bytes;
        sample_rows(kernel, task, worker);
    }
}

}  // namespace

void bind_sampling(nb::module_& module) {
    module.def("sample", &sample_batch, "isa"_a, "logits"_a, "sampling"_a, "output"_a, "errors"_a, "num_workers"_a = 1,
               "scratch"_a.noconvert() = nb::none());
    check_sampling_row(nb::module_::import_("octavo.batch").attr("SAMPLING_ROW"));
    module.def("check_sampling_row", &check_sampling_row, "dtype"_a);
    module.def("sampling_scratch_bytes", &sampling_scratch_bytes, "vocab"_a);
}

}  // namespace octavo
