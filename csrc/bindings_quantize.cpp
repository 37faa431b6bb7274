// Python bindings for the quantizers.
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

using Numbers = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool good, const std::string& message) {
    if (!good) throw nb::value_error(message.c_str());
}

FloatType float_type(const Numbers& x) {
    if (x.dtype() == nb::dtype<float>()) return FloatType::f32;
    if (x.dtype() == nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1})
        return FloatType::f16;
    require(x.dtype() == nb::dtype<uint16_t>(), "x must be float32, float16, or the bits of bfloat16 as uint16");
    return FloatType::bf16;
}

// Returns false, and quantizes nothing, if a value is not finite or exceeds the range of float16.
bool quantize_rows(const std::string& type_name, const Numbers& x, const std::optional<Array<float, 1>>& importance,
                   const OutBytes& out, const std::optional<std::string>& isa) {
    const QuantizerEntry& entry = find_quantizer(type_name, isa ? parse_isa(*isa) : detect_isa());
    const auto rows = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
    require(k % entry.block_values == 0, std::to_string(k) + " columns are not a whole number of " + type_name +
                                             " blocks of " + std::to_string(entry.block_values));
    require(!importance || static_cast<int64_t>(importance->shape(0)) == k,
            "importance must have " + std::to_string(k) + " entries");
    const int64_t wanted = rows * (k / entry.block_values) * entry.block_bytes;
    require(static_cast<int64_t>(out.shape(0)) == wanted, "the result takes " + std::to_string(wanted) + " bytes");
    std::vector<float> scratch(static_cast<size_t>(entry.scratch_bytes) / sizeof(float) + 1);
    const FloatType type = float_type(x);
    nb::gil_scoped_release release;
    thread_local std::vector<float> floats;  // allocating for each piece would cost a tenth of the time
    float* widened = nullptr;
    if (type != FloatType::f32) {
        if (floats.size() < static_cast<size_t>(rows * k)) floats.resize(static_cast<size_t>(rows * k));
        widened = floats.data();
    }
    if (!entry.widen(x.data(), type, rows * k, widened)) return false;
    entry.run({widened ? widened : static_cast<const float*>(x.data()), importance ? importance->data() : nullptr, rows,
               k, out.data(), scratch.data()});
    return true;
}

}  // namespace

void bind_quantize(nb::module_& module) {
    module.def("quantizer_names", &quantizer_names);
    module.def("quantize_rows", &quantize_rows, "type_name"_a, "x"_a, "importance"_a.none(), "out"_a,
               "isa"_a = nb::none());
}

}  // namespace octavo
