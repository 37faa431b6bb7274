// Python bindings for packed weights, and for single kernels in tests and benchmarks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "checksum.h"
#include "isa.h"
#include "mapping_guard.h"
#include "memory.h"
#include "pack.h"
#include "signature.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

void check_bytes(const std::string& what, const Bytes& data, int64_t wanted) {
    if (static_cast<int64_t>(data.shape(0)) != wanted)
        throw std::invalid_argument(what + " takes " + std::to_string(wanted) + " bytes, not " +
                                    std::to_string(data.shape(0)));
}

// Guards a mapped file, which it keeps alive.
class FileGuard {
  public:
    FileGuard(Bytes data, std::string path)
        : data_(std::move(data)), path_(std::move(path)), guard_(data_.data(), data_.shape(0)) {}
    const std::string& path() const { return path_; }
    bool is_damaged() const { return guard_.is_damaged(); }

  private:
    Bytes data_;
    std::string path_;
    MappingGuard guard_;  // destroyed before the data
};

// A packed matrix and the owner of its memory: the matrix itself, or a Python object (a mapped file).
class OwnedWeight {
  public:
    OwnedWeight(const std::string& type_name, const Bytes& data, int64_t n, int64_t k)
        : type_name_(type_name), weight_(describe_packed(type_name, n, k)) {
        const WeightType& type = parse_weight_type(type_name);
        check_bytes(label(), data, n * (k / block_values(type)) * type.file_bytes);
        pack([&](uint8_t* out) { pack_panels(weight_, data.data(), out, 0, num_panels(weight_)); });
    }

    static OwnedWeight* from_groups(const std::string& type_name, std::pair<int64_t, int64_t> shape, int32_t bits,
                                    int32_t zero, const Bytes& codes, const Bytes& scales,
                                    const std::optional<Bytes>& mins, const std::optional<Bytes>& orders) {
        const PackedWeight weight = describe_packed(type_name, shape.first, shape.second);
        std::unique_ptr<OwnedWeight> w(new OwnedWeight(type_name, weight, {}));
        const auto array = [](const std::optional<Bytes>& bytes) {
            return bytes ? ByteArray{bytes->data(), bytes->shape(0)} : ByteArray{nullptr, 0};
        };
        const GroupArrays arrays = {bits, zero, array(codes), array(scales), array(mins), array(orders)};
        check_groups(weight, type_name, arrays);
        w->pack([&](uint8_t* out) { pack_groups(weight, arrays, out); });
        return w.release();
    }

    // A view of bytes that are already packed. There must be exactly as many bytes as type and size ask for, since
    // kernels read them all.
    static OwnedWeight* view(const std::string& type_name, Bytes panels, int64_t n, int64_t k, nb::object guard) {
        PackedWeight weight = describe_packed(type_name, n, k);
        if (panels.shape(0) != packed_bytes(weight))
            throw std::invalid_argument(type_name + " of " + std::to_string(n) + " x " + std::to_string(k) + " takes " +
                                        std::to_string(packed_bytes(weight)) + " bytes when packed, not " +
                                        std::to_string(panels.shape(0)));
        if (reinterpret_cast<uintptr_t>(panels.data()) % 64 != 0)
            throw std::invalid_argument("packed bytes must be aligned to 64");
        weight.data = panels.data();
        std::unique_ptr<OwnedWeight> w(new OwnedWeight(type_name, weight, std::move(panels)));
        w->guard_ = std::move(guard);
        find_ranges(w->weight_);
        w->order_ids_ = find_orders(w->weight_);
        return w.release();
    }

    const nb::object& guard() const { return guard_; }
    const PackedWeight& weight() const { return weight_; }
    size_t nbytes() const { return packed_bytes(weight_); }
    bool is_view() const { return memory_.data() == nullptr; }
    bool reads_image() const { return !is_dense(weight_.type->traits) && weight_.num_orders == 0; }
    const std::string& type_name() const { return type_name_; }

  private:
    OwnedWeight(const std::string& type_name, const PackedWeight& weight, Bytes panels)
        : type_name_(type_name), weight_(weight), panels_(std::move(panels)) {}

    std::string label() const {
        return type_name_ + " of " + std::to_string(weight_.n) + " x " + std::to_string(weight_.k);
    }
    template <typename F>
    void pack(const F& write) {
        memory_ = SharedMemory(packed_bytes(weight_));
        uint8_t* const out = reinterpret_cast<uint8_t*>(memory_.data());
        weight_.data = out;
        const nb::gil_scoped_release release;  // callers pack several matrices at once
        write(out);
        write_ranges(weight_, out, 0, num_panels(weight_));
        find_ranges(weight_);
        order_ids_ = find_orders(weight_);
    }

    std::string type_name_;
    PackedWeight weight_{};
    nb::object guard_ = nb::none();  // guard of a mapped file
    std::vector<uint64_t> order_ids_;
    SharedMemory memory_;
    Bytes panels_;  // keeps a mapped file mapped
};

// One kernel with its own threads and scratch, called as a program would call it.
class KernelRun {
  public:
    KernelRun(const std::string& kernel, const std::string& isa, int num_threads) : pool_(options(isa, num_threads)) {
        const Isa level = parse_isa(isa);
        if (level > detect_isa())
            throw std::invalid_argument("this machine does not support " + isa + "; its highest level is " +
                                        isa_name(detect_isa()));
        entry_ = find_kernel(kernel, level);
        if (!entry_) throw std::invalid_argument("there is no kernel '" + kernel + "'");
    }

    // `inputs` and `output` are float32 matrices (None if absent), `weights` are packed or float32 vectors (None if
    // absent). All are in the order of the kernel's signature, with its tuples of weights last.
    void operator()(const nb::list& inputs, const nb::list& weights, const std::vector<int64_t>& ints,
                    const std::vector<float>& floats, const Floats& output, const std::vector<int32_t>& token_ids) {
        std::vector<View> views;
        for (const nb::handle input : inputs) views.push_back(view_of(input));
        std::vector<Weight> operands;
        for (const nb::handle weight : weights) operands.push_back(weight_of(weight));
        const OperandNames names = operand_names(*entry_->signature);
        if (views.size() != names.inputs.size() || ints.size() != names.ints.size() ||
            floats.size() != names.floats.size())
            throw std::invalid_argument("the kernel takes " + std::to_string(names.inputs.size()) + " inputs, " +
                                        std::to_string(names.ints.size()) + " integers and " +
                                        std::to_string(names.floats.size()) + " floats");
        Args args{};
        args.inputs = views.data();
        args.output = view_of(output);
        set_weights(args, operands, *entry_->signature);
        args.ints = ints.data();
        args.floats = floats.data();
        Step step{};
        step.num_tokens = static_cast<int32_t>(token_ids.size());
        step.token_ids = token_ids.data();
        check_operands_fit(entry_->name, args, *entry_);
        const nb::gil_scoped_release release;
        run(args, step);
    }

  private:
    static PoolOptions options(const std::string& isa, int num_threads) {
        if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("num_threads must be from 1 to 1024");
        PoolOptions options;
        options.count = num_threads;
        options.tiles = uses_tiles(parse_isa(isa));
        return options;
    }
    static View view_of(const Floats& array) {
        if (array.ndim() != 2) throw std::invalid_argument("a matrix must have two dimensions");
        return {array.data(), static_cast<int32_t>(array.shape(0)), static_cast<int32_t>(array.shape(1))};
    }
    static View view_of(nb::handle input) { return input.is_none() ? View{} : view_of(nb::cast<Floats>(input, false)); }
    static Weight weight_of(nb::handle weight) {
        if (weight.is_none()) return {};
        if (nb::isinstance<OwnedWeight>(weight)) return {&nb::cast<const OwnedWeight&>(weight).weight(), nullptr, 0};
        const Floats array = nb::cast<Floats>(weight, false);
        return {nullptr, array.data(), static_cast<int64_t>(array.size())};
    }

    void run(Args& args, const Step& step) {
        const ScratchSizes sizes = entry_->scratch ? entry_->scratch(args, step, pool_.count()) : ScratchSizes{};
        pool_.reserve_scratch(sizes.per_worker);
        if (shared_.size() < sizes.shared) shared_ = Memory(sizes.shared);
        args.shared_scratch = shared_.data();
        struct Context {
            const KernelEntry* entry;
            const Args& args;
            const Step& step;
        } context{entry_, args, step};
        pool_.run(
            [](void* opaque, Worker& worker, size_t) {
                const Context& c = *static_cast<Context*>(opaque);
                c.entry->run(c.args, c.step, worker);
            },
            &context);
    }

    ThreadPool pool_;
    const KernelEntry* entry_;
    Memory shared_;
};

}  // namespace

const PackedWeight* packed_weight_of(nb::handle object) {
    if (!nb::isinstance<OwnedWeight>(object)) throw nb::type_error("expected a PackedWeight");
    return &nb::cast<const OwnedWeight&>(object).weight();
}

static std::vector<uint64_t> checksums(const std::vector<Bytes>& arrays) {
    const nb::gil_scoped_release released;
    std::vector<uint64_t> sums;
    for (const Bytes& data : arrays) sums.push_back(checksum(data.data(), data.shape(0)));
    return sums;
}

static void bind_guard(nb::module_& module) {
    nb::class_<FileGuard>(module, "MappingGuard",
                          "Reports failed reads of a mapped file, which would otherwise end the process.")
        .def(nb::init<Bytes, std::string>(), "data"_a.noconvert(), "path"_a)
        .def_prop_ro("path", &FileGuard::path)
        .def_prop_ro("is_damaged", &FileGuard::is_damaged);
}

void bind_weights(nb::module_& module) {
    bind_guard(module);
    nb::class_<OwnedWeight>(module, "PackedWeight", "A matrix packed for the linear kernels.")
        .def_prop_ro("nbytes", &OwnedWeight::nbytes)
        .def_prop_ro("type_name", &OwnedWeight::type_name)
        .def_prop_ro("shape", [](const OwnedWeight& w) { return nb::make_tuple(w.weight().n, w.weight().k); })
        .def_prop_ro("is_view", &OwnedWeight::is_view)
        .def_prop_ro("reads_image", &OwnedWeight::reads_image)
        .def_prop_ro("guard", &OwnedWeight::guard)
        .def_prop_ro(
            "panels",
            [](const OwnedWeight& w) {
                const size_t size = w.nbytes();
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(w.weight().data, 1, &size, nb::find(w));
            },
            nb::rv_policy::reference);
    module.def(
        "pack_weight",
        [](const std::string& type_name, const Bytes& data, int64_t n, int64_t k) {
            return new OwnedWeight(type_name, data, n, k);
        },
        "type_name"_a, "data"_a.noconvert(), "n"_a, "k"_a,
        "Packs a matrix [n, k] from its GGUF blocks. Raises ValueError for a type or size that cannot be packed.");
    module.def("pack_groups", &OwnedWeight::from_groups, nb::rv_policy::take_ownership, "type_name"_a, "shape"_a,
               "bits"_a, "zero"_a, "codes"_a.noconvert(), "scales"_a.noconvert(), "mins"_a.noconvert().none(),
               "orders"_a.noconvert().none(), "Packs a matrix [n, k] from the codes and scales of its groups.");
    module.def(
        "code_table",
        [](const std::string& name) {
            for (const WeightType& type : WEIGHT_TYPES)
                if (name == type.name && comes_as_arrays(type) && type.table)
                    return std::make_pair(std::vector<int>(type.table, type.table + 16), type.table_factor);
            return std::make_pair(std::vector<int>(), 1.0f);
        },
        "name"_a, "The table of a grouped type, scaled to integers, and the scaling factor.");
    module.def("view_packed", &OwnedWeight::view, nb::rv_policy::take_ownership, "type_name"_a, "panels"_a.noconvert(),
               "n"_a, "k"_a, "guard"_a = nb::none(), "A matrix [n, k] that uses packed bytes without copying them.");
    module.def(
        "packed_nbytes",
        [](const std::string& type_name, int64_t n, int64_t k) {
            return packed_bytes(describe_packed(type_name, n, k));
        },
        "type_name"_a, "n"_a, "k"_a);
    module.def("checksums", checksums, "arrays"_a.noconvert());
    module.attr("PACK_LAYOUT_VERSION") = PACK_LAYOUT_VERSION;
    module.def("packable_types", [] {
        std::vector<std::string> names;
        for (const WeightType& type : WEIGHT_TYPES)
            if (!comes_as_arrays(type)) names.emplace_back(type.name);
        return names;
    });
    nb::class_<KernelRun>(module, "KernelRun", "A single kernel, for tests and benchmarks.")
        .def(nb::init<const std::string&, const std::string&, int>(), "kernel"_a, "isa"_a, "num_threads"_a)
        .def("__call__", &KernelRun::operator(), "inputs"_a, "weights"_a, "ints"_a, "floats"_a, "output"_a.noconvert(),
             "token_ids"_a = std::vector<int32_t>());
}

}  // namespace octavo
