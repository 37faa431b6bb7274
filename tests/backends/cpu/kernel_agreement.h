// Random operands in guarded memory, kernels run on them, and a judge of what they give: the tools of
// kernel_agreement.cpp and kernel_agreement_steps.cpp.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "isa.h"
#include "memory.h"
#include "pack.h"
#include "signature.h"
#include "thread_pool.h"

namespace octavo {

// xorshift64*: the same numbers everywhere.
class Random {
  public:
    uint32_t bits() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>(state_ * 0x2545f4914f6cdd1dull >> 32);
    }
    int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
    float uniform() { return static_cast<float>(static_cast<int32_t>(bits())) * 4.656612873e-10f; }  // [-1, 1)

  private:
    uint64_t state_ = 0x9e3779b97f4a7c15ull;
};

// Memory that ends where no page is, filled with NaN.
struct Floats {
    explicit Floats(size_t count) : memory(count * sizeof(float) + 4, Pages::guarded), size(count) {
        std::memset(memory.data(), 0xff, memory.size());
    }
    float* data() const { return reinterpret_cast<float*>(memory.data() + 4); }
    Memory memory;
    size_t size;
};

struct Matrix {
    Matrix() : Matrix(0, 0) {}
    Matrix(int32_t rows, int32_t cols) : rows(rows), cols(cols), values(static_cast<size_t>(rows) * cols) {}
    View view() const { return {rows ? values.data() : nullptr, rows, cols}; }
    int32_t rows, cols;
    Floats values;
};

inline Matrix random_matrix(Random& random, int32_t rows, int32_t cols, float size = 2.0f) {
    Matrix m(rows, cols);
    for (size_t i = 0; i < m.values.size; ++i) m.values.data()[i] = size * random.uniform();
    return m;
}

template <typename... Matrices>
std::vector<Matrix> matrices(Matrices... list) {
    std::vector<Matrix> out;
    (out.push_back(std::move(list)), ...);
    return out;
}

// The same with numbers that are rare and no numbers, in the first rows.
inline Matrix hostile_matrix(Random& random, int32_t rows, int32_t cols) {
    const float inf = __builtin_huge_valf(), nan = __builtin_nanf("");
    const float values[] = {0.0f, -0.0f, 1e-40f, -1e-45f, 3e38f, -3e38f, inf, -inf, nan, 88.5f, -87.5f, 0.625f};
    Matrix m = random_matrix(random, rows, cols);
    for (int32_t i = 0; i < std::min(rows, 12); ++i)
        for (int j = 0; j < 3; ++j) m.values.data()[i * cols + random.below(cols)] = values[i];
    return m;
}

// A packed matrix, a plain vector, or nothing.
struct Operand {
    PackedWeight packed{};
    std::shared_ptr<Memory> panels;
    std::shared_ptr<Floats> plain;
    std::shared_ptr<std::vector<uint64_t>> order_ids;

    // Memory for the panels of `packed`.
    uint8_t* allocate() {
        panels = std::make_shared<Memory>(packed_bytes(packed), Pages::guarded);
        uint8_t* const data = reinterpret_cast<uint8_t*>(panels->data());
        packed.data = data;
        return data;
    }
    // After packing.
    void add_ranges() {
        write_ranges(packed, reinterpret_cast<uint8_t*>(panels->data()), 0, num_panels(packed));
        find_ranges(packed);
    }
    Weight weight() const {
        if (panels) return {&packed, nullptr, 0};
        return plain ? Weight{nullptr, plain->data(), static_cast<int64_t>(plain->size)} : Weight{};
    }
};

inline Operand random_vector(Random& random, int32_t n, float size = 1.0f) {
    Operand operand;
    operand.plain = std::make_shared<Floats>(n);
    for (int32_t i = 0; i < n; ++i) operand.plain->data()[i] = size * random.uniform();
    return operand;
}

// Where the halves of a block lie in the file; -1: none.
struct HalfPlaces {
    int d, m;
};
inline HalfPlaces half_places(const WeightType& type) {
    switch (type.file) {
        case FileBlock::q2_k:
            return {80, 82};
        case FileBlock::q3_k:
            return {108, -1};
        case FileBlock::q6_k:
            return {208, -1};
        case FileBlock::tq1_0:
            return {52, -1};
        case FileBlock::tq2_0:
            return {64, -1};
        case FileBlock::iq1_m:  // four bits here and there: random_blocks
        case FileBlock::nvfp4:
            return {-1, -1};
        default:
            return {type.traits.scales == Scales::e8m0 ? -1 : 0, type.traits.mins == Mins::none ? -1 : 2};
    }
}

inline uint16_t random_half(Random& random) {  // 2^-7 to 2^-2, either sign
    return static_cast<uint16_t>((random.bits() & 0x83ffu) | static_cast<uint32_t>(8 + random.below(5)) << 10);
}

// Random blocks as a file has them. Dense types: any F16, moderate BF16 and F32.
inline std::vector<uint8_t> random_blocks(Random& random, const WeightType& type, size_t blocks) {
    const size_t size = static_cast<size_t>(type.file_bytes);
    std::vector<uint8_t> bytes(blocks * size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    for (size_t b = 0; b < blocks; ++b) {
        uint8_t* const block = bytes.data() + b * size;
        if (type.traits.codes == Codes::f16) continue;
        if (is_dense(type.traits)) {  // the exponent and its sign are in the last two bytes
            const uint16_t top = static_cast<uint16_t>((random.bits() & 0x807fu) | (118u + random.bits() % 10) << 7);
            std::memcpy(block + size - 2, &top, 2);
            continue;
        }
        if (type.traits.scales == Scales::e8m0) block[0] = static_cast<uint8_t>(110 + random.below(20));
        if (type.file == FileBlock::iq1_m) block[55] &= 0x2f;  // the sign and the highest bits of the exponent
        for (const int place : {half_places(type).d, half_places(type).m}) {
            const uint16_t half = random_half(random);
            if (place >= 0) std::memcpy(block + place, &half, 2);
        }
    }
    return bytes;
}

inline Operand pack(const WeightType& type, int32_t n, int32_t k, const std::vector<uint8_t>& blocks) {
    Operand operand;
    if (is_grouped(type.traits))
        operand.packed = describe_packed(type.name, n, k);
    else
        operand.packed = {&type, n, k, {}, packed_panel_bytes(type.traits, {}, k), nullptr};
    pack_panels(operand.packed, blocks.data(), operand.allocate(), 0, num_panels(operand.packed));
    operand.add_ranges();
    return operand;
}

inline Operand random_weight(Random& random, const WeightType& type, int32_t n, int32_t k) {
    return pack(type, n, k, random_blocks(random, type, static_cast<size_t>(n) * k / block_values(type)));
}

// A matrix of a grouped type with random codes, scales and minimums.
inline Operand random_groups(Random& random, const std::string& type_name, int32_t n, int32_t k) {
    Operand operand;
    operand.packed = describe_packed(type_name, n, k);
    const WeightType& type = *operand.packed.type;
    const Groups& groups = operand.packed.groups;
    const size_t count = static_cast<size_t>(n) * num_groups(groups, k);
    const auto random_bytes = [&](size_t size) {
        std::vector<uint8_t> bytes(size);
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
        return bytes;
    };
    const auto random_numbers = [&](size_t size, int bytes) {
        std::vector<uint8_t> numbers(size * bytes);
        for (size_t i = 0; i < size; ++i) {
            const uint16_t half = random_half(random);
            const float full = 0.1f * random.uniform();
            std::memcpy(numbers.data() + i * bytes, bytes == 2 ? static_cast<const void*>(&half) : &full, bytes);
        }
        return numbers;
    };
    const auto random_order = [&](int32_t* order) {
        for (int32_t i = 0; i < k; ++i) order[i] = i;
        for (int32_t i = k - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    };
    std::vector<uint8_t> codes = random_bytes(static_cast<size_t>(n) * k * type.traits.bits / 8);
    for (uint8_t& code : codes)
        if (has_exponents(type.traits)) code &= 0xbf;  // without NaN and infinity
    const std::vector<uint8_t> scales = random_numbers(count, groups.scale_bytes);
    std::vector<uint8_t> mins = groups.min_bytes == 1 ? random_bytes(count) : random_numbers(count, groups.min_bytes);
    if (has_e4m3_scales(type.traits)) mins = random_bytes(static_cast<size_t>(n) * k / 16);
    for (uint8_t& scale : mins)
        if (has_e4m3_scales(type.traits)) scale &= 0xbf;  // without NaN
    std::vector<uint8_t> orders(order_bytes(operand.packed));
    for (size_t at = 0; at < orders.size(); at += 4 * static_cast<size_t>(k))
        random_order(reinterpret_cast<int32_t*>(orders.data() + at));
    const auto array = [](const std::vector<uint8_t>& v) { return ByteArray{v.data(), v.size()}; };
    const int32_t bits = type.traits.bits;
    const GroupArrays arrays = {bits, 1 << (bits - 1), array(codes), array(scales), array(mins), array(orders)};
    check_groups(operand.packed, type_name, arrays);
    pack_groups(operand.packed, arrays, operand.allocate());
    operand.add_ranges();
    operand.order_ids = std::make_shared<std::vector<uint64_t>>(find_orders(operand.packed));
    return operand;
}

inline Operand random_weight(Random& random, const std::string& type_name, int32_t n, int32_t k) {
    if (comes_as_arrays(*describe_packed(type_name, n, k).type)) return random_groups(random, type_name, n, k);
    return random_weight(random, parse_weight_type(type_name), n, k);
}

// One call of a kernel. Everything but the output is the same for all instruction sets.
struct Call {
    std::string kernel;
    std::vector<Matrix> inputs;
    std::vector<Operand> weights;  // those of tuples last
    std::vector<int64_t> ints;
    std::vector<float> floats;
    int32_t rows = 0, cols = 0;  // of the output
    Step step{};
    Step limits{};  // for scratch
};

// The kernel of a call. Ends the program unless the call has as many numbers as the kernel reads: it would read beyond
// them.
inline const KernelEntry& kernel_of(const Call& call, Isa level) {
    const KernelEntry* const entry = find_kernel(call.kernel, level);
    if (!entry) {
        std::printf("there is no kernel %s\n", call.kernel.c_str());
        std::exit(1);
    }
    const OperandNames names = operand_names(*entry->signature);
    if (call.ints.size() != names.ints.size() || call.floats.size() != names.floats.size()) {
        std::printf("%s reads %zu ints and %zu floats, and a call has %zu and %zu\n", call.kernel.c_str(),
                    names.ints.size(), names.floats.size(), call.ints.size(), call.floats.size());
        std::exit(1);
    }
    return *entry;
}

// Runs a job on all workers of a pool.
template <typename F>
void run_on(ThreadPool& pool, const F& job) {
    pool.run([](void* context, Worker& worker, size_t) { (*static_cast<const F*>(context))(worker); },
             const_cast<F*>(&job));
}

// `cache`, `state`: of the operation, or null. Only `rows` rows of inputs and output.
inline Matrix run(const Call& call, Isa level, int workers, int32_t rows, LayerCache* cache,
                  StateSlots* state = nullptr) {
    const KernelEntry& entry = kernel_of(call, level);
    Matrix output(rows, call.cols);
    std::vector<View> views;
    for (const Matrix& input : call.inputs) {
        views.push_back(input.view());
        if (call.rows == views.back().rows) views.back().rows = rows;
    }
    std::vector<Weight> weights;
    for (const Operand& operand : call.weights) weights.push_back(operand.weight());
    Args args{};
    args.inputs = views.data();
    args.output = output.view();
    set_weights(args, weights, *entry.signature);
    args.ints = call.ints.data();
    args.floats = call.floats.data();
    args.cache = cache;
    args.state = state;
    PoolOptions options;
    options.count = workers;
    options.tiles = uses_tiles(level);
    ThreadPool pool(options);
    const ScratchSizes sizes = entry.scratch ? entry.scratch(args, call.limits, workers) : ScratchSizes{};
    pool.reserve_scratch(sizes.per_worker);
    const Memory shared(sizes.shared);
    args.shared_scratch = shared.data();
    run_on(pool, [&](Worker& worker) { entry.run(args, call.step, worker); });
    return output;
}

// Whether a level has an arithmetic of its own for products with the weights of a call (linear_amx.h).
inline bool has_own_products(const Call& call, int level) {
    const std::string& kernel = call.kernel;
    const bool is_product = kernel == "moe" || kernel == "logits" || kernel.find("linear") != std::string::npos;
    if (!is_product || !uses_tiles(static_cast<Isa>(level))) return false;
    for (const Operand& operand : call.weights)
        if (operand.panels && operand.packed.type->traits.codes != Codes::f32 &&
            operand.packed.type->traits.codes != Codes::f16)
            return true;
    return false;
}

class Judge {
  public:
    // Compares all instruction sets at the given numbers of rows; the scalar one runs once, with all of them. A level
    // with its own products must be near it, and give a row the same bits whatever their number.
    void compare(const Call& call, const std::string& what, const std::vector<int32_t>& row_counts) {
        const Matrix scalar = run(call, Isa::scalar, 1, call.rows, nullptr);
        for (int level = 1; level <= static_cast<int>(detect_isa()); ++level) {
            const bool is_own = has_own_products(call, level);
            const Matrix own = is_own ? run(call, static_cast<Isa>(level), 1, call.rows, nullptr) : Matrix();
            const Matrix& expected = is_own ? own : scalar;
            if (is_own) check_nearly(call.kernel, level, what, scalar, own);
            for (const int32_t rows : row_counts) {
                const Matrix output = run(call, static_cast<Isa>(level), 1 + rows % 3, rows, nullptr);
                check(call.kernel, level, what + ", " + std::to_string(rows) + " rows", expected.values.data(),
                      output.values.data(), output.values.size);
            }
        }
    }
    void compare(const Call& call, const std::string& what) { compare(call, what, {call.rows}); }

    void check(const std::string& kernel, int level, const std::string& what, const float* expected,
               const float* actual, size_t size) {
        seen_.insert(kernel);
        ++comparisons_;
        for (size_t i = 0; i < size; ++i) {
            const bool both_nan = expected[i] != expected[i] && actual[i] != actual[i];
            if (both_nan || std::memcmp(expected + i, actual + i, 4) == 0) continue;
            std::printf("%s on %s, %s: number %zu is %.9g, not %.9g\n", kernel.c_str(),
                        isa_name(static_cast<Isa>(level)), what.c_str(), i, actual[i], expected[i]);
            std::exit(1);
        }
    }

    // As near as int8 activations and bfloat16 bring it. A row with sums that are hardly finite may have others, but no
    // number where there is none.
    void check_nearly(const std::string& kernel, int level, const std::string& what, const Matrix& expected,
                      const Matrix& actual) {
        constexpr float LARGE = 1e20f;
        double error = 0, scale = 0;
        for (int32_t r = 0; r < expected.rows; ++r) {
            const float* const e = expected.values.data() + int64_t{r} * expected.cols;
            const float* const a = actual.values.data() + int64_t{r} * expected.cols;
            const bool is_usual = std::all_of(e, e + expected.cols, [](float x) { return x > -LARGE && x < LARGE; });
            for (int32_t i = 0; i < expected.cols; ++i) {
                if (is_usual) error += (double{a[i]} - double{e[i]}) * (double{a[i]} - double{e[i]});
                if (is_usual) scale += double{e[i]} * double{e[i]};
                if (e[i] != e[i] && a[i] - a[i] == 0.0f) error = __builtin_huge_val();
            }
        }
        if (error <= MOST_ERROR * scale) return;
        std::printf("%s on %s, %s: the relative squared error is %g\n", kernel.c_str(),
                    isa_name(static_cast<Isa>(level)), what.c_str(), error / scale);
        std::exit(1);
    }

    // Every kernel must have been compared, but those that only measure, or need a group of ranks (test_collective.py,
    // test_sampling_on_ranks.py) or the tables of adapters (tests/adapters/test_rows.py).
    void finish() const {
        for (const std::string& name : kernel_names()) {
            const bool needs_more = name.rfind("all_", 0) == 0 || name == "sample_parts" || name == "adapted_linear" ||
                                    name == "adapted_moe" || name == "add_to_embedding";
            if (seen_.count(name) || needs_more || name.rfind("ceiling_", 0) == 0) continue;
            std::printf("the kernel %s was never compared\n", name.c_str());
            std::exit(1);
        }
        std::printf("%d comparisons of %zu kernels agree\n", comparisons_, seen_.size());
    }

  private:
    static constexpr double MOST_ERROR = 2e-3;
    std::set<std::string> seen_;
    int comparisons_ = 0;
};

// Compares the operations that depend on a step: attention, states, rotary positions, sampling.
void compare_steps(Judge& judge, Random& random);

}  // namespace octavo
