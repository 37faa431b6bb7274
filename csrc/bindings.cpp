// The Python module octavo.backends.cpu._native.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "bindings_step.h"
#include "isa.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using ValueTuple = std::tuple<size_t, int32_t, int32_t>;                      // offset, cols, domain
using LimitsTuple = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;  // tokens ... vocab_size
// name, rows, components, has_starts, groups
using DomainTuple = std::tuple<std::string, int32_t, int32_t, bool, std::vector<int32_t>>;
using IndexTuple = std::tuple<std::string, int32_t, int32_t, int32_t, bool>;  // key, domain, source, width, keeps
using AdapterTuple =
    std::tuple<int32_t, int32_t, Array<uint16_t, 1>, Array<uint16_t, 1>, Array<float, 1>, int32_t, float>;
using TimingTuple = std::tuple<std::string, std::string, int64_t, int64_t, int64_t>;

ProgramOptions make_options(const std::string& isa, int num_threads, std::pair<int, int> spin_us,
                            const LimitsTuple& limits, int32_t logits_rows, bool checked) {
    ProgramOptions options;
    options.isa = parse_isa(isa);
    if (options.isa > detect_isa())
        throw std::invalid_argument("this machine does not support " + isa + "; its highest level is " +
                                    isa_name(detect_isa()));
    if (num_threads < 1 || num_threads > 1024)
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ", must be from 1 to 1024");
    options.pool.count = num_threads;
    std::tie(options.pool.barrier_spin_us, options.pool.idle_spin_us) = spin_us;
    StepLimits& l = options.limits;
    std::tie(l.tokens, l.requests, l.outputs, l.model_len, l.vocab_size) = limits;
    l.domains = {{"tokens", "query_start_loc", l.tokens, 1, true, {}},
                 {"output rows", "", l.outputs, 0, false, {}},
                 {"output rows", "", l.outputs, 0, false, {}}};
    l.indices = {{"output_indices", "", DOMAIN_OUTPUTS, DOMAIN_TOKENS, 1, false}};
    if (logits_rows < 0) throw std::invalid_argument("logits_rows must not be negative");
    l.logits_rows = logits_rows;
    options.checked = checked;
    return options;
}

// Adds the arrays that batches of this graph carry beyond the standard ones.
void add_domains(StepLimits& limits, const std::vector<DomainTuple>& domains, const std::vector<IndexTuple>& indices,
                 int32_t token_components) {
    limits.domains[DOMAIN_TOKENS].components = token_components;
    for (const auto& [name, rows, components, has_starts, groups] : domains)
        limits.domains.push_back({name, name + ".starts", rows, components, has_starts, groups});
    const auto check = [&](int32_t domain) {
        if (domain < 0 || static_cast<size_t>(domain) >= limits.domains.size())
            throw std::invalid_argument("an index array refers to an unknown domain");
    };
    for (const auto& [key, domain, source, width, keeps] : indices) {
        check(domain);
        check(source);
        if (width < 1) throw std::invalid_argument("an index array must have a width of at least 1");
        limits.indices.push_back({limits.domains[domain].name + "." + key, key, domain, source, width, keeps});
    }
}

std::vector<ProgramValue> make_values(const std::vector<ValueTuple>& tuples) {
    std::vector<ProgramValue> values;
    for (const auto& [offset, cols, domain] : tuples) values.push_back({offset, cols, domain});
    return values;
}

// Called in every step, so the registry is searched only once per level. of_parts: the variant for several ranks.
KernelFn sampling_kernel(Isa isa, bool of_parts) {
    static KernelFn known[NUM_ISAS][2] = {};
    KernelFn& kernel = known[static_cast<int>(isa)][of_parts];
    if (!kernel) kernel = find_kernel(of_parts ? "sample_parts" : "sample", isa)->run;
    return kernel;
}

// Pairs of a value's index and an array of the value's size.
using ArrayList = std::vector<std::pair<int32_t, nb::object>>;

// A step in flight and the Python objects whose memory it reads and writes.
class PyPendingStep {
  public:
    // Reads and checks everything except the numbers in the batch, which are checked against the limits of `Program`.
    PyPendingStep(nb::object owner, Program& program, nb::handle batch, int32_t result, nb::handle output,
                  nb::handle errors, const ArrayList& copies, const ArrayList& inputs, nb::handle earlier_tokens,
                  const DomainList& rows)
        : owner_(std::move(owner)), arrays_(batch), output_(nb::borrow(output)), errors_(nb::borrow(errors)) {
        pending_.step = arrays_.step();
        const StepLimits& limits = program.limits();
        if (limits.domains.size() > FIRST_FURTHER_DOMAIN || limits.indices.size() > 1 || !rows.empty())
            further_.emplace(rows, limits, pending_.step);
        if (!earlier_tokens.is_none()) {
            sources_.emplace(batch, earlier_tokens, pending_.step);
            pending_.earlier_tokens = sources_->earlier_tokens();
        }
        read_blocks(batch);
        pending_.result = result;
        pending_.copies = transfers(program, copies);
        pending_.inputs = transfers(program, inputs);
        const nb::object sampling = batch.attr("sampling");
        if (!sampling.is_none()) read_sampling(program, sampling);
    }
    PyPendingStep(const PyPendingStep&) = delete;
    PyPendingStep& operator=(const PyPendingStep&) = delete;
    ~PyPendingStep() {
        try {
            wait();
        } catch (const std::runtime_error&) {  // the result of this step is no longer wanted
        }
    }

    // Starts the step, or queues it behind the one in flight. Waits while two steps are in flight.
    void submit(Program& program, std::pair<int32_t, int32_t> records) {
        std::tie(pending_.first_record, pending_.end_record) = records;
        std::unique_lock<std::mutex> lock = program.try_lock_for_step();
        if (!lock) {
            const nb::gil_scoped_release release;
            lock = program.lock_for_step();
        }
        const std::string error = check_step(pending_.step, program.limits());
        if (!error.empty()) throw std::invalid_argument(error);
        program.check_moves(pending_);
        program.submit(pending_);
    }

    void wait() {
        std::optional<nb::gil_scoped_release> release;
        if (!pending_.is_done()) release.emplace();
        pending_.wait();
    }
    double seconds() const { return pending_.seconds; }

  private:
    void read_blocks(nb::handle batch) {
        const auto read = [&](const char* name, bool writable, auto& arrays, BlockBytes& blocks) {
            if (const nb::object moved = batch.attr(name); !moved.is_none())
                blocks = arrays.emplace(moved, name, writable).blocks();
        };
        read("block_saves", true, block_saves_, pending_.block_saves);
        read("block_loads", false, block_loads_, pending_.block_loads);
        read("snapshot_saves", true, snapshot_saves_, pending_.snapshot_saves);
        read("snapshot_loads", false, snapshot_loads_, pending_.snapshot_loads);
    }

    std::vector<Program::Transfer> transfers(const Program& program, const ArrayList& list) {
        std::vector<Program::Transfer> values;
        for (const auto& [value, object] : list) {
            nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> array;
            if (!nb::try_cast(object, array, false) ||
                array.shape(0) != static_cast<size_t>(program.value_rows(value, pending_.step)) ||
                array.shape(1) != static_cast<size_t>(program.values().at(value).cols))
                throw nb::value_error("an input or a copy must be contiguous float32 [rows, columns] of the value");
            if (program.values()[value].is_image) throw nb::value_error("the value is kept as an image, not as floats");
            values.push_back({value, array.data()});
            kept_.push_back(object);
        }
        return values;
    }

    // Logits split over ranks are sampled from candidates, unless the caller wants all logits or sampling needs them.
    void sample_on_ranks(Program& program) {
        const auto& ranks = program.gathered_logits(pending_.result);
        const SamplingBatch& batch = task_.batch;
        if (!ranks) return;
        const bool is_copied = std::any_of(pending_.copies.begin(), pending_.copies.end(),
                                           [&](const auto& copy) { return copy.value == pending_.result; });
        if (is_copied || needs_all_logits(batch, pending_.step.num_logits, *ranks->exchange)) {
            if (ranks->exchange->rank > 0) pending_.finale = nullptr;  // the first rank samples
            task_.exchange = ranks->exchange;
            return;
        }
        parts_ = {task_,         program.values().at(ranks->part).cols, ranks->first, ranks->exchange,
                  ranks->gather, program.value_data(pending_.result),   nullptr};
        parts_.task.logits = program.value_data(ranks->part);
        is_open_.resize(static_cast<size_t>(pending_.step.num_logits));
        pending_.result = ranks->part;
        kernel_ = sampling_kernel(program.isa(), true);
        pending_.finale = [](void* context, Worker& worker, int32_t first_row, int32_t end_row) {
            PyPendingStep& step = *static_cast<PyPendingStep*>(context);
            PartsTask parts = step.parts_;
            parts.task.first_row = first_row;
            parts.task.end_row = end_row;
            parts.is_open = step.is_open_.data();
            sample_parts(step.kernel_, parts, worker);
        };
    }

    void read_sampling(Program& program, nb::handle sampling) {
        const ProgramValue& value = program.values().at(pending_.result);
        if (!value.is_output()) throw nb::value_error("only values with output rows can be sampled");
        const int32_t rows = pending_.step.num_logits;
        sampling_.emplace(sampling, rows, value.cols);
        kernel_ = sampling_kernel(program.isa(), false);
        task_ = {program.value_data(pending_.result),      0,      rows, value.cols, sampling_->batch(),
                 read_step_output(output_, errors_, rows), nullptr};
        for (int32_t r = 0; r < rows; ++r)
            if (task_.batch.rows[r].num_logprobs > task_.output.num_top)
                throw nb::value_error("num_logprobs exceeds the columns of top_ids");
        pending_.finale_context = this;
        pending_.finale = [](void* context, Worker& worker, int32_t first_row, int32_t end_row) {
            const PyPendingStep& step = *static_cast<PyPendingStep*>(context);
            SamplingTask task = step.task_;
            task.first_row = first_row;
            task.end_row = end_row;
            sample_rows(step.kernel_, task, worker);
        };
        sample_on_ranks(program);
    }

    nb::object owner_;
    StepArrays arrays_;
    std::optional<FurtherRows> further_;
    std::optional<BlockArrays> block_saves_, block_loads_, snapshot_saves_, snapshot_loads_;
    std::optional<TokenSources> sources_;
    std::optional<SamplingArrays> sampling_;
    nb::object output_, errors_;
    std::vector<nb::object> kept_;
    KernelFn kernel_ = nullptr;
    SamplingTask task_{};
    PartsTask parts_{};             // used with several ranks
    std::vector<uint8_t> is_open_;  // PartsTask::is_open
    Program::PendingStep pending_;
};

// Operands with the names of the fields that they come from.
template <typename T>
using Named = std::vector<std::pair<std::string, T>>;

template <typename T>
void unzip(const Named<T>& operands, std::vector<std::string>& names, std::vector<T>& values) {
    for (const auto& [name, value] : operands) {
        names.push_back(name);
        values.push_back(value);
    }
}

// A program and the Python objects whose memory it reads.
class PyProgram {
  public:
    PyProgram(const std::string& isa, int num_threads, std::pair<int, int> spin_us, const LimitsTuple& limits,
              const std::vector<ValueTuple>& values, size_t workspace_bytes, int32_t logits_rows, bool checked,
              const std::vector<DomainTuple>& domains, const std::vector<IndexTuple>& indices, int32_t token_components)
        : program_(
              [&] {
                  ProgramOptions options = make_options(isa, num_threads, spin_us, limits, logits_rows, checked);
                  add_domains(options.limits, domains, indices, token_components);
                  return options;
              }(),
              make_values(values), workspace_bytes) {}

    int32_t add_packed_weight(nb::object weight) {
        const PackedWeight* const packed = packed_weight_of(weight);
        kept_.push_back(std::move(weight));
        return program_.add_weight({packed, nullptr, 0});
    }

    int32_t add_plain_weight(Array<float, 1> array) {
        const Weight weight{nullptr, array.data(), static_cast<int64_t>(array.shape(0))};
        kept_.push_back(nb::cast(array));
        return program_.add_weight(weight);
    }

    void share_threads(const PyProgram& other) { program_.share_threads(other.program_); }

    void borrow_cache(const PyProgram& other) { program_.borrow_cache(other.program_); }

    // Call before adding records. Throws ValueError if a row of a gathered value does not fit into the group's buffer.
    void join(nb::object group) {
        CollectiveGroup* const joined = nb::cast<CollectiveGroup*>(group);
        for (const ProgramValue& value : program_.values())
            if (value.cols * sizeof(float) > joined->exchange()->bytes)
                throw std::invalid_argument("a row of " + std::to_string(value.cols) +
                                            " numbers does not fit into the group's buffer");
        kept_.push_back(std::move(group));
        program_.join(joined);
    }

    void add_record(const std::string& kernel, const std::string& label, int32_t output, const Named<int32_t>& inputs,
                    const Named<int32_t>& weights, const Named<int64_t>& ints, const Named<float>& floats,
                    const Named<std::vector<int32_t>>& tuples, std::pair<int32_t, int32_t> cache, int64_t state_size) {
        RecordSpec spec;
        spec.kernel = kernel;
        spec.label = label;
        spec.output = output;
        std::tie(spec.cache, spec.cache_group) = cache;
        spec.state_size = state_size;
        unzip(inputs, spec.names.inputs, spec.inputs);
        unzip(weights, spec.names.weights, spec.weights);
        unzip(ints, spec.names.ints, spec.ints);
        unzip(floats, spec.names.floats, spec.floats);
        for (const auto& [name, elements] : tuples) {
            spec.names.tuples.push_back(name);
            spec.weights.insert(spec.weights.end(), elements.begin(), elements.end());
        }
        program_.add_record(spec);
    }

    // Starts one step: moves and copies blocks, runs all records that lead to the value `result`, and samples
    // `batch.sampling` from it into `output`. `inputs` are values to write first, `copies` values to read at the end.
    // `earlier_tokens` are the tokens of the previous step, for `batch.token_sources`. `rows` holds the rows of domains
    // for which `batch` has no array.
    std::unique_ptr<PyPendingStep> submit(nb::handle batch, int32_t result, nb::handle output, nb::handle errors,
                                          const ArrayList& copies, const ArrayList& inputs, nb::handle earlier_tokens,
                                          const DomainList& rows, std::pair<int32_t, int32_t> records) {
        if (program_.closed()) throw std::runtime_error("the executor is closed");
        auto step = std::make_unique<PyPendingStep>(nb::find(this), program_, batch, result, output, errors, copies,
                                                    inputs, earlier_tokens, rows);
        step->submit(program_, records);
        return step;
    }

    // A view of a value in the workspace, as the last run left it. For tests only: it dangles after close().
    nb::ndarray<nb::numpy, float, nb::ndim<2>> value(int32_t index, size_t rows) {
        float* const data = program_.value_data(index);
        if (program_.values()[index].is_image) throw nb::value_error("the value is kept as an image, not as floats");
        const size_t shape[2] = {rows, static_cast<size_t>(program_.values().at(index).cols)};
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, 2, shape, nb::find(this));
    }

    // Fills a slot with the parts of an adapter: record, weight, A and B as 16-bit floats, gain, rank, scale.
    void set_adapter(int32_t slot, const std::vector<AdapterTuple>& tuples) {
        std::vector<Program::AdapterPart> parts;
        std::vector<nb::object> kept;
        for (const auto& [record, weight, a, b, gain, rank, scale] : tuples) {
            const auto data = [](const auto& array) { return array.shape(0) ? array.data() : nullptr; };
            parts.push_back(
                {record, weight, {data(a), data(b), data(gain), rank, scale}, a.shape(0), b.shape(0), gain.shape(0)});
            kept.push_back(nb::cast(a));
            kept.push_back(nb::cast(b));
            kept.push_back(nb::cast(gain));
        }
        std::unique_lock<std::mutex> lock;
        {
            nb::gil_scoped_release release;
            lock = program_.lock();
        }
        if (program_.closed()) throw std::runtime_error("the executor is closed");
        program_.set_adapter(slot, parts);
        adapters_[slot].swap(kept);
    }

    void start_profile() {
        nb::gil_scoped_release release;
        const auto lock = program_.lock();
        program_.start_profile();
    }

    std::vector<TimingTuple> profile() {
        nb::gil_scoped_release release;
        const auto lock = program_.lock();
        std::vector<TimingTuple> rows;
        for (const Program::Timing& t : program_.profile())
            rows.emplace_back(t.label, t.kernel, t.calls, t.nanoseconds, t.busy_nanoseconds);
        return rows;
    }

    void close() {
        std::unique_lock<std::mutex> lock;
        {
            nb::gil_scoped_release release;
            lock = program_.lock();
        }
        program_.close();  // No step is running, and no other Python thread that could ask for progress.
        kept_.clear();
    }

    Program& program() { return program_; }

  private:
    std::vector<nb::object> kept_;                         // destroyed after the program, whose threads use it
    std::map<int32_t, std::vector<nb::object>> adapters_;  // by slot
    Program program_;
};

void bind_program(nb::module_& module) {
    nb::class_<PyPendingStep>(module, "PendingStep")
        .def("wait", &PyPendingStep::wait)
        .def_prop_ro("seconds", &PyPendingStep::seconds);
    nb::class_<PyProgram>(module, "Program")
        .def(
            nb::init<const std::string&, int, std::pair<int, int>, const LimitsTuple&, const std::vector<ValueTuple>&,
                     size_t, int32_t, bool, const std::vector<DomainTuple>&, const std::vector<IndexTuple>&, int32_t>(),
            "isa"_a, "num_threads"_a, "spin_us"_a, "limits"_a, "values"_a, "workspace_bytes"_a, nb::kw_only(),
            "logits_rows"_a = 0, "checked"_a = false, "domains"_a = std::vector<DomainTuple>(),
            "indices"_a = std::vector<IndexTuple>(), "token_components"_a = 1)
        .def("join", &PyProgram::join, "group"_a)
        .def(
            "keep_as_image", [](PyProgram& p, int32_t value) { p.program().keep_as_image(value); }, "value"_a)
        .def("share_threads", &PyProgram::share_threads, "other"_a)
        .def("add_packed_weight", &PyProgram::add_packed_weight, "weight"_a)
        .def(
            "stream_weights",
            [](PyProgram& p, const std::vector<int32_t>& weights, size_t ahead_bytes) {
                p.program().stream_weights(weights, ahead_bytes);
            },
            "weights"_a, "ahead_bytes"_a)
        .def("add_plain_weight", &PyProgram::add_plain_weight, "array"_a)
        .def("add_record", &PyProgram::add_record, "kernel"_a, "label"_a, "output"_a, "inputs"_a,
             "weights"_a = Named<int32_t>(), "ints"_a = Named<int64_t>(), "floats"_a = Named<float>(),
             "tuples"_a = Named<std::vector<int32_t>>(), "cache"_a = std::pair(-1, 0), "state_size"_a = 0)
        .def("set_adapter", &PyProgram::set_adapter, "slot"_a, "parts"_a)
        .def("finish",
             [](PyProgram& p) {
                 int32_t widest = 0;  // any value of output rows may be sampled
                 for (const ProgramValue& value : p.program().values())
                     if (value.is_output()) widest = std::max(widest, value.cols);
                 const size_t of_ranks = parts_scratch_bytes(widest, p.program().num_ranks());
                 p.program().finish(sampling_scratch_bytes(widest) + of_ranks);
             })
        .def(
            "allocate_cache",
            [](PyProgram& p, int32_t blocks, int32_t size, int32_t states) {
                p.program().allocate_cache(blocks, size, states);
            },
            "num_blocks"_a, "block_size"_a, "num_states"_a = 0)
        .def("borrow_cache", &PyProgram::borrow_cache, "other"_a, nb::keep_alive<1, 2>())
        .def("submit", &PyProgram::submit, "batch"_a, "result"_a, "output"_a.none(), "errors"_a.none(),
             "copies"_a = ArrayList(), "inputs"_a = ArrayList(), "earlier_tokens"_a.none() = nb::none(),
             "rows"_a = DomainList(), "records"_a = std::pair<int32_t, int32_t>(0, -1))
        .def("value", &PyProgram::value, "index"_a, "rows"_a)
        .def("start_profile", &PyProgram::start_profile)
        .def("profile", &PyProgram::profile)
        .def("close", &PyProgram::close)
        .def_prop_ro("progress", [](PyProgram& p) { return p.program().progress(); })
        .def_prop_ro("num_records", [](PyProgram& p) { return p.program().num_records(); })
        .def_prop_ro("closed", [](PyProgram& p) { return p.program().closed(); })
        .def_prop_ro("workspace_bytes", [](PyProgram& p) { return p.program().workspace_bytes(); });
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, module) {
    using namespace octavo;
    nb::set_leak_warnings(false);  // a model that is still loaded when the interpreter exits is not a leak
    module.doc() = "The native CPU library: kernels, threads and compiled programs.";
    module.def("detected_isa", [] { return isa_name(detect_isa()); });
    module.def("known_isas", [] {
        std::vector<std::string> names;
        for (int i = 0; i < NUM_ISAS; ++i) names.emplace_back(isa_name(static_cast<Isa>(i)));
        return names;
    });
    module.def("kernel_names", &kernel_names);
    bind_program(module);
    bind_weights(module);
    check_sampling_row(nb::module_::import_("octavo.batch").attr("SAMPLING_ROW"));
    bind_quantize(module);
    bind_collective(module);
}
