// Groups of ranks in Python: to give to a program, and to exchange arrays for tests and measurements.
#include <nanobind/stl/string.h>

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

// Samples rows of which this rank has a part of the logits. For tests; executors do it after the last record of a step.
void sample_part(CollectiveGroup& group, const std::string& isa, Array<float, 2> logits, int32_t first, int32_t vocab,
                 nb::handle sampling, nb::handle output, nb::handle errors) {
    const size_t rows = logits.shape(0);
    const auto part = static_cast<int32_t>(logits.shape(1));
    if (first < 0 || part > vocab - first) throw std::invalid_argument("the part lies outside the vocabulary");
    if (vocab * sizeof(float) > group.exchange()->bytes)
        throw std::invalid_argument("a row of logits is larger than the group's buffer");
    const SamplingArrays arrays(sampling, rows, vocab);
    const SamplingTask task{
        logits.data(), 0, static_cast<int32_t>(rows), vocab, arrays.batch(), read_step_output(output, errors, rows)};
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

}  // namespace

void bind_collective(nb::module_& module) {
    nb::class_<CollectiveGroup>(module, "CollectiveGroup")
        .def(
            "__init__",
            [](CollectiveGroup* self, const std::string& name, int32_t rank, int32_t size, size_t buffer_bytes,
               int32_t join_ms, int32_t silence_ms, int32_t deadline_ms, int32_t numa_node,
               const nb::object& given_up) {
                GroupOptions options;
                options.name = name;
                options.rank = rank;
                options.size = size;
                options.buffer_bytes = buffer_bytes;
                options.join_ms = join_ms;
                options.silence_ms = silence_ms;
                options.deadline_ms = deadline_ms;
                options.numa_node = numa_node;
                if (!given_up.is_none())
                    options.given_up = [function = given_up.ptr()] {  // which the caller keeps
                        nb::gil_scoped_acquire acquire;
                        return nb::cast<std::string>(nb::handle(function)());
                    };
                nb::gil_scoped_release release;
                new (self) CollectiveGroup(options);
            },
            "name"_a, "rank"_a, "size"_a, nb::kw_only(), "buffer_bytes"_a = GroupOptions{}.buffer_bytes,
            "join_ms"_a = GroupOptions{}.join_ms, "silence_ms"_a = GroupOptions{}.silence_ms,
            "deadline_ms"_a = GroupOptions{}.deadline_ms, "numa_node"_a = GroupOptions{}.numa_node,
            "given_up"_a.none() = nb::none())
        .def(
            "all_reduce",
            [](CollectiveGroup& group, nb::handle x) {
                const Buffer<float, 2> array(x, "x", true);
                run(group, "all_reduce", view_of(array), view_of(array));
            },
            "x"_a)
        .def(
            "all_gather",
            [](CollectiveGroup& group, nb::handle x, nb::handle out) {
                const Buffer<float, 2> array(x, "x"), gathered(out, "out", true);
                if (array.shape(0) != gathered.shape(0) || array.shape(1) > gathered.shape(1))
                    throw std::invalid_argument("x and out do not have the same rows, or x is wider");
                if (gathered.shape(1) * sizeof(float) > group.exchange()->bytes)
                    throw std::invalid_argument("a row of out is larger than the group's buffer");
                run(group, "all_gather", view_of(array), view_of(gathered));
            },
            "x"_a, "out"_a)
        .def("sample", &sample_part, "isa"_a, "logits"_a, "first"_a, "vocab"_a, "sampling"_a, "output"_a, "errors"_a)
        .def_prop_ro("given_bytes", [](CollectiveGroup& group) { return group.exchange()->given_bytes; })
        .def("fail", &CollectiveGroup::fail, "reason"_a)
        .def_prop_ro("placement_error", &CollectiveGroup::placement_error)
        .def_prop_ro("error", &CollectiveGroup::error)
        .def_prop_ro("is_waiting", &CollectiveGroup::is_waiting);
}

}  // namespace octavo
