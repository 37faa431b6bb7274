// Coverage-guided fuzzing of the packers by libFuzzer; docs/fuzzing.md has the command.
//
// An input names a type, a size and arrays. Either the arrays are refused (std::invalid_argument), or the packers read
// and write within them: every array lies in memory of its own size, which AddressSanitizer watches.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pack.h"

namespace octavo {
namespace {

constexpr int64_t MAX_VALUES = 1 << 16;
const char* const GROUPED[] = {"I4_128",        "I8_32_Z",      "I2_64_M",  "I3_128_Z_F32", "I4_ROW",
                               "I4_64_ORDER",   "I4_32_ORDER8", "NF4_64",   "FP4_64",       "NVFP4_16",
                               "F8_E4M3",       "F8_E4M3_ROW",  "F8_E5M2",  "F8_E5M2_ROW",  "F8_E4M3_128X128",
                               "F8_E5M2_32X64", "I8_128_M_F32", "I8_ROW_Z", "I4_0",         "F8_E4M3_0X9999999999"};

// The bytes of an input, one after another; zeros behind its end.
class Input {
public:
    Input(const uint8_t* data, size_t size) : next(data), end(data + size) {}
    uint8_t byte() { return next < end ? *next++ : 0; }
    int32_t number() { return byte() | byte() << 8; }
    // `size` bytes that the rest of the input fills, again and again.
    std::unique_ptr<uint8_t[]> array(size_t size) {
        std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]());
        const size_t left = static_cast<size_t>(end - next);
        for (size_t i = 0; left > 0 && i < size; ++i) bytes[i] = next[i % left];
        return bytes;
    }

private:
    const uint8_t *next, *end;
};

std::string type_name(Input& input) {
    constexpr size_t types = std::size(WEIGHT_TYPES), grouped = std::size(GROUPED);
    const size_t choice = input.byte() % (types + grouped);
    return choice < types ? WEIGHT_TYPES[choice].name : GROUPED[choice - types];
}

struct Freed {
    void operator()(uint8_t* p) const { std::free(p); }
};

// Memory for a packed matrix, aligned as the kernels want it and not a byte longer.
std::unique_ptr<uint8_t, Freed> packed_memory(const PackedWeight& w) {
    const size_t size = packed_bytes(w);
    return std::unique_ptr<uint8_t, Freed>(static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
}

void check_orders(PackedWeight& w, uint8_t* packed) {
    w.data = packed;
    find_ranges(w);
    find_orders(w);
    for (int32_t i = 0; i < w.num_orders * w.k; ++i)
        if (w.order[i] < 0 || w.order[i] >= w.k) std::abort();
}

void pack_blocks(PackedWeight& w, Input& input) {
    const size_t blocks = static_cast<size_t>(w.n) * (w.k / block_values(*w.type));
    const int32_t panels = num_panels(w), middle = input.byte() % (panels + 1);
    const auto source = input.array(blocks * static_cast<size_t>(w.type->file_bytes));
    const auto out = packed_memory(w);
    pack_panels(w, source.get(), out.get(), 0, middle);
    pack_panels(w, source.get(), out.get(), middle, panels);
    write_ranges(w, out.get(), 0, panels);
    check_orders(w, out.get());
}

// Bytes that claim to be packed already, such as those of a damaged file.
void view(PackedWeight& w, Input& input) {
    const auto out = packed_memory(w);
    const auto bytes = input.array(packed_bytes(w));
    std::memcpy(out.get(), bytes.get(), packed_bytes(w));
    check_orders(w, out.get());
}

// Lengths near those that a matrix takes, so that some are right.
size_t some_length(Input& input, size_t right) {
    const int32_t change = input.byte();
    return change < 200 ? right : static_cast<size_t>(std::max<int64_t>(0, static_cast<int64_t>(right) + change - 228));
}

void pack_arrays(const std::string& name, PackedWeight& w, Input& input) {
    GroupArrays arrays{};
    arrays.bits = input.byte() % 10;
    arrays.zero = input.byte() % 10;
    const int64_t groups = w.groups.k > 0 ? (w.k + w.groups.k - 1) / w.groups.k : 1;
    const size_t rows = static_cast<size_t>(w.n);
    const size_t codes = some_length(input, rows * static_cast<size_t>(w.k) * static_cast<size_t>(arrays.bits) / 8);
    const size_t scales = some_length(input, rows * static_cast<size_t>(groups * w.groups.scale_bytes));
    const size_t mins = some_length(input, rows * static_cast<size_t>(groups * w.groups.min_bytes));
    const size_t orders = some_length(input, order_bytes(w));
    const auto code_bytes = input.array(codes), scale_bytes = input.array(scales), min_bytes = input.array(mins);
    auto order = input.array(orders);
    arrays.codes = {code_bytes.get(), codes};
    arrays.scales = {scale_bytes.get(), scales};
    arrays.mins = {min_bytes.get(), mins};
    arrays.orders = {order.get(), orders};
    check_groups(w, name, arrays);
    const auto out = packed_memory(w);
    pack_groups(w, arrays, out.get());
    write_ranges(w, out.get(), 0, num_panels(w));
    check_orders(w, out.get());
}

void pack(Input input) {
    const std::string name = type_name(input);
    const int64_t n = input.number() % 300, k = input.number() % 2100;
    if (n * k > MAX_VALUES) return;
    PackedWeight w = describe_packed(name, n, k);
    if (input.byte() < 64)
        view(w, input);
    else if (comes_as_arrays(*w.type))
        pack_arrays(name, w, input);
    else
        pack_blocks(w, input);
}

}  // namespace
}  // namespace octavo

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        octavo::pack(octavo::Input(data, size));
    } catch (const std::invalid_argument& error) {
        if (std::strlen(error.what()) == 0) std::abort();
    }
    return 0;
}
