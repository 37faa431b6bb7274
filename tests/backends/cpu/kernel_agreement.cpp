// Runs every kernel on every instruction set of this machine and compares it with the scalar one, bit for bit (two NaN
// are equal); products with quantized weights on AMX with themselves in other batches, and nearly with the scalar ones.
// Needs no Python, so it also runs under an emulator of another processor.
//
// Usage: kernel_agreement [LEVEL]    LEVEL: the highest instruction set that this machine must be found to have
#include "kernel_agreement.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace {

using namespace octavo;

constexpr int32_t MAX_ROWS = 130;  // more than a block of the linear kernels

std::vector<int32_t> rows_up_to(int32_t most) {
    std::vector<int32_t> rows;
    for (int32_t r = 1; r <= most; ++r) rows.push_back(r);
    return rows;
}

// The types of WEIGHT_TYPES, of grouped ones with several kinds of groups.
std::vector<std::string> type_names() {
    std::vector<std::string> names;
    for (const WeightType& type : WEIGHT_TYPES) {
        if (!comes_as_arrays(type) || has_e4m3_scales(type.traits)) {
            names.push_back(type.name);
        } else if (has_exponents(type.traits)) {
            names.push_back(type.name);
            names.push_back(std::string(type.name) + "_128X128");
        } else if (type.traits.mins == Mins::none) {
            names.push_back(std::string(type.name) + "_32");
            names.push_back(std::string(type.name) + "_ROW_F32");
            names.push_back(std::string(type.name) + "_256");
        } else {
            names.push_back(std::string(type.name) + "_32_Z_ORDER");
            names.push_back(std::string(type.name) + "_ROW_M_F32");
            names.push_back(std::string(type.name) + "_128_M");
            names.push_back(std::string(type.name) + "_64_Z_F32");
        }
    }
    return names;
}

void compare_linear(Judge& judge, Random& random) {
    for (const std::string& type : type_names()) {
        const PackedWeight packed = describe_packed(type, 1, 768);
        const bool wide_blocks = (is_grouped(packed.type->traits) ? packed.groups.k : packed.type->traits.block_k) > 32;
        const auto compare = [&](int32_t n, int32_t k, const std::vector<int32_t>& row_counts, bool hostile) {
            Call call;
            call.kernel = "linear";
            call.rows = *std::max_element(row_counts.begin(), row_counts.end());
            call.cols = n;
            call.inputs =
                matrices(hostile ? hostile_matrix(random, call.rows, k) : random_matrix(random, call.rows, k));
            call.weights = {random_weight(random, type, n, k), n % 2 ? random_vector(random, n) : Operand{}};
            judge.compare(call, type + " [" + std::to_string(n) + ", " + std::to_string(k) + "]", row_counts);
        };
        std::vector<int32_t> rows = rows_up_to(40);
        rows.push_back(MAX_ROWS);
        compare(37, wide_blocks ? 768 : 544, rows, false);  // more units than are unpacked at once
        compare(1, wide_blocks ? 256 : 32, {1, 2, 13}, false);
        compare(64, wide_blocks ? 512 : 96, {1, 3, 5, 8, 9, 19}, true);
    }
}

// Layouts that WEIGHT_TYPES lacks though it has their traits. A row is all that describes them: they are packed, and
// run on the kernels as they are compiled.
constexpr int8_t ADDED_TABLE[16] = {-127, -91, -60, -37, -20, -9, -3, 0, 1, 5, 13, 27, 46, 72, 103, 127};
constexpr WeightType ADDED_TYPES[] = {
    {"a table of bytes", FileBlock::simple, 18, {Codes::byte_table, 4, 32, Scales::f16}, 0, ADDED_TABLE},
    {"codes about 5", FileBlock::simple, 18, {Codes::offset, 4, 32, Scales::f16}, 5},
};
constexpr bool needs_no_new_kernel(const WeightType& added) {
    for (const WeightType& type : WEIGHT_TYPES)
        if (type.traits == added.traits) return is_computable(added);
    return false;
}
static_assert(needs_no_new_kernel(ADDED_TYPES[0]) && needs_no_new_kernel(ADDED_TYPES[1]));

void check_added_types(Judge& judge, Random& random) {
    constexpr int32_t n = 37, k = 64;
    for (const WeightType& type : ADDED_TYPES) {
        std::vector<uint8_t> blocks = random_blocks(random, type, n * k / 32);
        Matrix x(k, k), expected(k, n);  // row i of x picks column i of the weight, without rounding
        for (int32_t i = 0; i < k; ++i) {
            for (int32_t j = 0; j < k; ++j) x.values.data()[i * k + j] = i == j ? 127.0f : 0.0f;
            for (int32_t j = 0; j < n; ++j) {
                uint8_t* const block = blocks.data() + (j * k + i) / 32 * 18;
                block[0] = 0, block[1] = 0x34;  // a scale of 0.25
                const int code = block[2 + i % 16] >> (i % 32 / 16 * 4) & 15;
                const int value = type.table ? type.table[code] : code - type.zero;
                expected.values.data()[i * n + j] = 127.0f * 0.25f * static_cast<float>(value);
            }
        }
        Call call;
        call.kernel = "linear";
        call.rows = k;
        call.cols = n;
        call.inputs = matrices(std::move(x));
        call.weights = {pack(type, n, k, blocks), Operand{}};
        for (int level = 0; level <= static_cast<int>(detect_isa()); ++level)
            for (const int32_t rows : {1, 7, 9, k}) {
                const Matrix output = run(call, static_cast<Isa>(level), 2, rows, nullptr);
                judge.check(call.kernel, level, std::string(type.name) + ", " + std::to_string(rows) + " rows",
                            expected.values.data(), output.values.data(), output.values.size);
            }
    }
}

void compare_products(Judge& judge, Random& random) {
    const int32_t k = 256, n = 50;
    for (const int64_t kind : {KIND_NONE, KIND_SILU, KIND_GELU_TANH}) {
        Call call;
        call.kernel = "fused_linear";
        call.rows = MAX_ROWS;
        call.cols = kind == KIND_NONE ? 2 * n : n;
        call.inputs = matrices(random_matrix(random, call.rows, k),
                               kind == KIND_SILU ? Matrix() : random_matrix(random, call.rows, call.cols));
        const Operand norm = random_vector(random, k);
        call.weights = {norm, random_weight(random, "Q4_K", n, k), random_weight(random, "Q6_K", n, k),
                        random_vector(random, n), Operand{}};
        call.ints = {kind};
        call.floats = {1e-5f};
        judge.compare(call, "kind " + std::to_string(kind), {1, 2, 7, 9, 32, MAX_ROWS});
    }
    Call call;
    call.kernel = "logits";
    call.rows = 11;
    call.cols = n;
    call.inputs = matrices(random_matrix(random, call.rows, k));
    call.weights = {random_weight(random, "Q8_0", n, k), Operand{}};
    call.floats = {30.0f, 0.5f};
    judge.compare(call, "with soft cap", rows_up_to(call.rows));

    for (const char* type : {"Q8_0", "BF16", "I4_32_ORDER3"}) {
        call.kernel = "head_linear";
        call.rows = MAX_ROWS;
        call.cols = 3 * 48;
        call.inputs = matrices(random_matrix(random, call.rows, 3 * 64));
        call.weights = {random_weight(random, type, 3 * 48, 64)};
        call.floats = {};
        judge.compare(call, type, {1, 5, 9, MAX_ROWS});
    }

    const int32_t experts = 6, inner = 32;
    call.kernel = "moe";
    call.rows = 33;
    call.cols = 64;
    call.inputs = matrices(random_matrix(random, call.rows, call.cols), Matrix());
    call.weights = {random_weight(random, "BF16", experts, 64), random_weight(random, "Q4_0", experts * inner, 64),
                    random_weight(random, "Q5_1", experts * inner, 64),
                    random_weight(random, "Q8_0", experts * 64, inner)};
    const std::vector<Operand> no_biases(6);
    const auto add_biases = [&](const std::vector<Operand>& biases) {
        call.weights.insert(call.weights.end(), biases.begin(), biases.end());
    };
    add_biases(no_biases);
    call.floats = {1.5f, 0.1f, 0.0f, 0.0f};
    for (const int64_t scoring : {KIND_SOFTMAX, KIND_SIGMOID, KIND_SPARSEMIXER}) {
        call.ints = {2, scoring, 1, 1, 1, 1, scoring == KIND_SIGMOID, 0, KIND_SILU, 0, 1, 0};
        judge.compare(call, "scoring " + std::to_string(scoring), {1, 5, 33});
    }
    call.weights[0] = random_weight(random, "BF16", experts + 3, 64);
    call.ints = {4, KIND_SOFTMAX, 0, 1, 1, 1, 0, 3, KIND_SILU, 0, 1, 0};
    judge.compare(call, "with identities", {1, 5, 33});
    call.weights[0] = random_weight(random, "BF16", experts, 64);
    call.weights.resize(4);
    add_biases({random_vector(random, experts), random_vector(random, experts), random_vector(random, experts * inner),
                random_vector(random, experts * inner), random_vector(random, experts * 64),
                random_vector(random, experts)});
    call.floats = {1.0f, 0.0f, 0.7f, 1.0f};
    for (const bool limits_activated : {false, true}) {
        call.ints = {2, KIND_SIGMOID, 0, 3, 2, 2, 0, 0, KIND_QUICK_GELU, 0, 1, limits_activated};
        judge.compare(call, limits_activated ? "with limits behind the activation" : "with groups and biases",
                      {1, 5, 33});
    }
    call.inputs = matrices(random_matrix(random, call.rows, call.cols), random_matrix(random, call.rows, call.cols));
    judge.compare(call, "with rows for the router", {1, 5, 33});
    call.ints = {2, KIND_SOFTMAX, 1, 1, 1, 1, 0, 0, KIND_SILU, 0, 1, 0};
    call.weights = {random_weight(random, "BF16", experts, 64), random_weight(random, "I4_64_Z", experts * inner, 64),
                    random_weight(random, "I3_32", experts * inner, 64),
                    random_weight(random, "I8_ROW_F32", experts * 64, inner)};
    add_biases(no_biases);
    judge.compare(call, "grouped", {1, 5, 33});
    call.weights = {random_weight(random, "BF16", experts, 64),
                    random_weight(random, "I4_64_Z_ORDER6", experts * inner, 64),
                    random_weight(random, "NF4_32", experts * inner, 64),
                    random_weight(random, "I4_32_ORDER6", experts * 64, inner)};
    add_biases(no_biases);
    judge.compare(call, "with orders", {1, 5, 33});
}

void compare_embedding(Judge& judge, Random& random) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 40; ++i) ids.push_back(random.below(37));
    Call call;
    call.kernel = "embedding";
    call.rows = call.step.num_tokens = 40;
    call.cols = 768;
    call.step.token_ids = ids.data();
    call.ints = {1, 0, 0};
    for (const std::string& type : type_names()) {
        call.weights = {random_weight(random, type, 37, call.cols)};
        judge.compare(call, type);
    }
    std::vector<int32_t> positions;
    for (int32_t i = 0; i < 40; ++i) positions.push_back(random.below(35));
    call.kernel = "position_embedding";
    call.step.positions = positions.data();
    call.ints = {2};
    judge.compare(call, "offset 2");
    call.kernel = "token_type_embedding";
    call.ints.clear();
    judge.compare(call, "no types");
    call.step.token_types = positions.data();
    judge.compare(call, "types");
    call.kernel = "embedding";
    std::vector<uint8_t> halves(1 << 17);
    for (size_t i = 0; i < halves.size(); i += 2) {
        const uint16_t half = static_cast<uint16_t>(i / 2);
        std::memcpy(halves.data() + i, &half, 2);
    }
    call.cols = 2048;
    call.rows = 32;
    call.ints = {1, 0, 0};
    for (int32_t i = 0; i < 32; ++i) ids[i] = i;
    call.weights = {pack(parse_weight_type("F16"), 32, call.cols, halves)};
    judge.compare(call, "all halves");
}

void compare_simple(Judge& judge, Random& random) {
    for (const int32_t cols : {1, 15, 96, 333}) {
        Call call;
        call.rows = 13;
        call.cols = cols;
        call.inputs = matrices(hostile_matrix(random, call.rows, cols), random_matrix(random, call.rows, cols));
        const Operand weight = random_vector(random, cols), bias = random_vector(random, cols);
        const std::string what = std::to_string(cols) + " columns";
        const auto compare = [&](const char* kernel, std::vector<Operand> weights, std::vector<int64_t> ints,
                                 std::vector<float> floats) {
            call.kernel = kernel;
            call.weights = std::move(weights);
            call.ints = std::move(ints);
            call.floats = std::move(floats);
            judge.compare(call, what);
        };
        compare("layer_norm", {weight, bias}, {0}, {1e-5f});
        compare("rms_norm", {weight}, {0}, {1e-5f});
        compare("add", {}, {}, {});
        compare("mul", {}, {}, {});
        compare("scale", {}, {}, {1e-5f});
        compare("softcap", {}, {}, {1e-5f});
        compare("clip", {}, {}, {-0.5f, 0.5f});
        if (cols % 3 == 0) {
            call.kernel = "layer_norm";
            call.weights = {weight, bias};
            call.ints = {cols / 3};
            call.floats = {1e-5f};
            judge.compare(call, what + ", three groups");
            Call groups;
            groups.kernel = "mul";
            groups.rows = call.rows;
            groups.cols = cols;
            groups.inputs =
                matrices(hostile_matrix(random, call.rows, cols), random_matrix(random, call.rows, cols / 3));
            judge.compare(groups, what + ", three a factor");
        }
        call.kernel = "rms_norm";
        call.weights = {Operand{}};
        call.ints = {cols};
        call.floats = {1e-5f};
        judge.compare(call, what + ", no weight");
        call.weights = {};
        call.floats = {};
        for (int64_t kind = KIND_SILU; kind <= KIND_QUICK_GELU; ++kind)
            for (const char* kernel : {"activation", "gated_activation"}) {
                call.kernel = kernel;
                call.ints = {kind};
                judge.compare(call, what + ", kind " + std::to_string(kind));
            }
        int32_t one = 1;
        const std::vector<int32_t> chosen = {12, 0, 5}, spliced = {-1, 12, 0, 0, -1, -1, 7, 1, 2, -1, 3, 5, -1};
        const int32_t* const indices[] = {spliced.data()};
        call.step.indices = indices;
        call.ints = {1};
        for (const char* kernel : {"splice", "add_rows"}) {
            call.kernel = kernel;
            judge.compare(call, what);
        }
        std::vector<Matrix> inputs;
        inputs.swap(call.inputs);
        std::swap(call.cols, one);
        call.kernel = "adapter_slots";
        judge.compare(call, what);
        inputs.swap(call.inputs);
        std::swap(call.cols, one);
        call.kernel = "gather";
        call.rows = 3;
        call.step.output_indices = chosen.data();
        call.ints = {0, 1};
        judge.compare(call, what);
        call.kernel = "pool_rows";
        call.rows = 1;
        call.ints = {0, 3};
        judge.compare(call, what);
        call.rows = 3;
        call.ints = {};
        const std::vector<int32_t> starts = {0, 4, 5, 13};
        call.kernel = "mean_pool";
        call.step.num_requests = 3;
        call.step.query_start_loc = starts.data();
        judge.compare(call, what);
        call.kernel = "max_pool";
        judge.compare(call, what);
    }
}

// Norms over columns that several ranks have, of which this is one with `cols` columns.
void compare_spanning(Judge& judge, Random& random) {
    for (const int32_t cols : {1, 15, 96, 333}) {
        Call call;
        call.rows = 13;
        call.cols = 1;
        for (const int64_t power : {1, 2}) {
            call.kernel = "group_sums";
            call.inputs = matrices(random_matrix(random, call.rows, cols),
                                   power == 1 ? Matrix() : random_matrix(random, call.rows, 1));
            call.ints = {2 * cols, cols / 2, 1, power};
            judge.compare(call, std::to_string(cols) + " columns, power " + std::to_string(power));
        }
        call.kernel = "spanning_norm";
        call.cols = cols;
        call.inputs = matrices(random_matrix(random, call.rows, cols), random_matrix(random, call.rows, 1),
                               random_matrix(random, call.rows, 1));
        call.weights = {random_vector(random, cols), Operand{}};
        call.ints = {2 * cols, cols / 2, 1};
        call.floats = {1e-5f};
        judge.compare(call, std::to_string(cols) + " columns");
    }
}

// Operations on two streams of `cols` columns side by side.
void compare_streams(Judge& judge, Random& random) {
    for (const int32_t cols : {1, 15, 96, 333}) {
        Call call;
        call.rows = 13;
        const auto compare = [&](const char* kernel, std::vector<int32_t> inputs, std::vector<Operand> weights,
                                 int32_t out, std::vector<float> floats = {}) {
            call.kernel = kernel;
            call.floats = std::move(floats);
            call.cols = out;
            call.inputs.clear();
            for (const int32_t width : inputs) call.inputs.push_back(random_matrix(random, call.rows, width));
            call.weights = std::move(weights);
            judge.compare(call, std::to_string(cols) + " columns");
        };
        call.ints = {cols / 2, cols};
        compare("columns", {2 * cols}, {}, cols);
        call.ints.clear();
        compare("side_by_side", {2 * cols, cols}, {}, 3 * cols);
        compare("mix_streams", {2 * cols, 4}, {}, 2 * cols);
        compare("add_to_streams", {2 * cols, cols, 2}, {random_vector(random, 2)}, 2 * cols);
        compare("match_magnitude", {2 * cols, cols}, {}, 2 * cols, {0.4f});
        compare("scale_columns", {cols}, {random_vector(random, cols)}, cols);
        compare("scale_columns", {cols}, {random_vector(random, 1)}, cols);
        compare("sparsify", {cols}, {}, cols, {0.4f});
    }
}

void compare_encoder(Judge& judge, Random& random) {
    const std::vector<int32_t> starts = {0, 3, 4, 120, 160};
    for (const int32_t dim : {7, 32, 64})
        for (const int32_t window : {0, 1, 40}) {
            Call call;
            call.weights = {window == 1 ? Operand{} : random_vector(random, 4),
                            window == 0 ? random_vector(random, 4 * 61) : Operand{}, Operand{}, Operand{}};
            call.kernel = "encoder_attention";
            call.rows = call.step.num_tokens = 160;
            call.cols = 4 * dim;
            call.step.num_requests = 4;
            call.step.query_start_loc = starts.data();
            call.inputs = matrices(random_matrix(random, call.rows, 4 * dim), random_matrix(random, call.rows, 2 * dim),
                                   random_matrix(random, call.rows, 2 * dim));
            call.ints = {4, 2, dim, window};
            call.floats = {0.2f, window == 40 ? 20.0f : 0.0f};
            judge.compare(call, std::to_string(dim) + " columns, window " + std::to_string(window));
            if (window == 1) continue;
            call.inputs = matrices(random_matrix(random, call.rows, 4 * dim), random_matrix(random, call.rows, 4 * dim),
                                   random_matrix(random, call.rows, 4 * dim));
            call.ints = {4, 4, dim, window};
            call.weights[2] = random_vector(random, 4 * dim * 61);
            if (window) call.weights[3] = random_vector(random, 4 * dim * 61);
            judge.compare(call, std::to_string(dim) + " columns with vectors of distances");
        }
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what was said before a crash is seen
    const std::string found = octavo::isa_name(octavo::detect_isa());
    std::printf("instruction set: %s\n", found.c_str());
    if (argc > 1 && found != argv[1]) {
        std::printf("wanted: %s\n", argv[1]);
        return 2;
    }
    Judge judge;
    Random random;
    compare_simple(judge, random);
    compare_linear(judge, random);
    check_added_types(judge, random);
    compare_products(judge, random);
    compare_embedding(judge, random);
    compare_encoder(judge, random);
    compare_streams(judge, random);
    compare_spanning(judge, random);
    compare_steps(judge, random);
    judge.finish();
    return 0;
}
