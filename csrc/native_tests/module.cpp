// Entry points that only tests and benchmarks call: individual kernels for sampling and for exchanges between ranks. A
// separate module that is built unless OCTAVO_NATIVE_TESTS is off, as it is for wheels. Its functions take classes from
// the shipped module.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings_step.h"
#include "collective.h"
#include "isa.h"
#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Scratch = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Runs the share of each of `num_workers` in turn on the calling thread. scratch: aligned to 64 bytes.
void sample_batch(const std::string& isa, Array<float, 2> logits, nb::handle sampling, nb::handle output,
                  nb::handle errors, int num_workers, const std::optional<Scratch>& scratch) {
    const size_t rows = logits.shape(0);
    const int32_t vocab = static_cast<int32_t>(logits.shape(1));
    const SamplingArrays arrays(sampling, rows, vocab);
    const SamplingTask task{
        logits.data(), 0, static_cast<int32_t>(rows), vocab, arrays.batch(), read_step_output(output, errors, rows),
        nullptr};
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

// Runs the kernel of an operation on the calling thread.
void run(CollectiveGroup& group, const char* operation, View x, View out) {
    const KernelEntry* const kernel = find_kernel(operation, detect_isa());
    Args args{};
    args.inputs = &x;
    args.output = out;
    args.shared_scratch = group.exchange();
    Worker worker{};
    worker.count = 1;
    nb::gil_scoped_release release;
    kernel->run(args, Step{}, worker);
    if (!group.exchange()->met) throw std::runtime_error(group.error());
}

// Samples rows from this rank's part of the logits. In production, executors do this after the last record of a step.
void sample_part(CollectiveGroup& group, const std::string& isa, Array<float, 2> logits, int32_t first, int32_t vocab,
                 nb::handle sampling, nb::handle output, nb::handle errors) {
    const size_t rows = logits.shape(0);
    const auto part = static_cast<int32_t>(logits.shape(1));
    if (first < 0 || part > vocab - first) throw std::invalid_argument("the part is outside the vocabulary");
    if (vocab * sizeof(float) > group.exchange()->bytes)
        throw std::invalid_argument("a row of logits is larger than the group's buffer");
    const SamplingArrays arrays(sampling, rows, vocab);
    const SamplingTask task{
        logits.data(), 0, static_cast<int32_t>(rows), vocab, arrays.batch(), read_step_output(output, errors, rows),
        nullptr};
    const Isa level = parse_isa(isa);
    std::vector<float> gathered(rows * static_cast<size_t>(vocab));
    std::vector<uint8_t> is_open(rows);
    PartsTask parts{
        task, part, first, group.exchange(), find_kernel("all_gather", level)->run, gathered.data(), is_open.data()};
    const Memory scratch(sampling_scratch_bytes(vocab) + parts_scratch_bytes(vocab, group.size()));
    Worker worker{};
    worker.count = 1;
    worker.scratch = scratch.data();
    const nb::gil_scoped_release release;
    sample_parts(find_kernel("sample_parts", level)->run, parts, worker);
    if (!group.exchange()->met) throw std::runtime_error(group.error());
}

View view_of(const Buffer<float, 2>& array) {
    return {const_cast<float*>(array.data()), static_cast<int32_t>(array.shape(0)),
            static_cast<int32_t>(array.shape(1))};
}

void bind_collective_tests(nb::module_& module) {
    module.def(
        "all_reduce",
        [](CollectiveGroup& group, nb::handle x) {
            const Buffer<float, 2> array(x, "x", true);
            run(group, "all_reduce", view_of(array), view_of(array));
        },
        "group"_a, "x"_a);
    module.def(
        "all_gather",
        [](CollectiveGroup& group, nb::handle x, nb::handle out) {
            const Buffer<float, 2> array(x, "x"), gathered(out, "out", true);
            if (array.shape(0) != gathered.shape(0) || array.shape(1) > gathered.shape(1))
                throw std::invalid_argument("x and out must have the same number of rows, and x must not be wider");
            if (gathered.shape(1) * sizeof(float) > group.exchange()->bytes)
                throw std::invalid_argument("a row of out is larger than the group's buffer");
            run(group, "all_gather", view_of(array), view_of(gathered));
        },
        "group"_a, "x"_a, "out"_a);
    module.def("sample_part", &sample_part, "group"_a, "isa"_a, "logits"_a, "first"_a, "vocab"_a, "sampling"_a,
               "output"_a, "errors"_a);
    module.def("given_bytes", [](CollectiveGroup& group) { return group.exchange()->given_bytes; }, "group"_a);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native_tests, module) {
    using namespace octavo;
    nb::set_leak_warnings(false);
    module.doc() = "Entry points for tests and benchmarks; not included in wheels.";
    nb::module_::import_("octavo.backends.cpu._native");  // defines the classes that the functions take
    module.def("sample", &sample_batch, "isa"_a, "logits"_a, "sampling"_a, "output"_a, "errors"_a, "num_workers"_a = 1,
               "scratch"_a.noconvert() = nb::none());
    module.def("check_sampling_row", &check_sampling_row, "dtype"_a);
    module.def("sampling_scratch_bytes", &sampling_scratch_bytes, "vocab"_a);
    module.def(
        "kernel_isa",
        [](const std::string& kernel, const std::string& level) -> nb::object {
            const KernelEntry* const entry = find_kernel(kernel, parse_isa(level));
            return entry ? nb::object(nb::str(entry->isa)) : nb::none();
        },
        "kernel"_a, "level"_a);
    bind_collective_tests(module);
}
