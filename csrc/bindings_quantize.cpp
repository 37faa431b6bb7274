// The quantizers for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings.h"
#include "isa.h"
#include "quantizers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool good, const std::string& message) {
    if (!good) throw nb::value_error(message.c_str());
}

void quantize_rows(const std::string& type_name, const Array<float, 2>& x,
                   const std::optional<Array<float, 1>>& importance, const OutBytes& out,
                   const std::optional<std::string>& isa) {
    const QuantizerEntry& entry = find_quantizer(type_name, isa ? parse_isa(*isa) : detect_isa());
    const auto rows = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
    require(k % entry.block_values == 0, std::to_string(k) + " columns are not a whole number of " + type_name +
                                             " blocks of " + std::to_string(entry.block_values));
    require(!importance || static_cast<int64_t>(importance->shape(0)) == k,
            "importance must have " + std::to_string(k) + " entries");
    const int64_t wanted = rows * (k / entry.block_values) * entry.block_bytes;
    require(static_cast<int64_t>(out.shape(0)) == wanted, "the result takes " + std::to_string(wanted) + " bytes");
    std::vector<float> scratch(static_cast<size_t>(entry.scratch_bytes) / sizeof(float) + 1);
    const QuantizeRows task = {x.data(),      importance ? importance->data() : nullptr, rows, k, out.data(),
                               scratch.data()};
    nb::gil_scoped_release release;
    entry.run(task);
}

}  // namespace

void bind_quantize(nb::module_& module) {
    module.def("quantizer_names", &quantizer_names);
    module.def("quantize_rows", &quantize_rows, "type_name"_a, "x"_a, "importance"_a.none(), "out"_a,
               "isa"_a = nb::none());
}

}  // namespace octavo
