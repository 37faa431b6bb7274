#include "signature.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "packed_weight.h"

namespace octavo {
namespace {

// Splits "(a, b)" into a and b.
std::vector<std::string> split(const char* text) {
    std::vector<std::string> names;
    bool inside = false;
    for (; *text; ++text) {
        const bool is_name = std::isalnum(static_cast<unsigned char>(*text)) || *text == '_';
        if (is_name && !inside) names.emplace_back();
        if (is_name) names.back() += *text;
        inside = is_name;
    }
    return names;
}

void compare(const std::string& label, const char* kind, const std::vector<std::string>& operation,
             const std::vector<std::string>& kernel) {
    for (size_t i = 0; i < std::max(operation.size(), kernel.size()); ++i) {
        const std::string found = i < operation.size() ? "field '" + operation[i] + "'" : "nothing";
        const std::string wanted = i < kernel.size() ? "'" + kernel[i] + "'" : "nothing";
        if (i < operation.size() && i < kernel.size() && operation[i] == kernel[i]) continue;
        throw std::invalid_argument(label + ": the operation has " + found + " as " + kind + " " + std::to_string(i) +
                                    ", its kernel reads " + wanted +
                                    " there; give class and OCTAVO_SIGNATURE the same fields in the same order");
    }
}

std::string shape_of(int64_t rows, int64_t cols) {
    return " [" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

std::string shape_of(const Weight& weight) {
    if (weight.packed) return shape_of(weight.packed->n, weight.packed->k);
    return weight.data ? " [" + std::to_string(weight.size) + "]" : " absent";
}

// Every operand with its shape or value.
std::string describe_operands(const Args& args, const OperandNames& names) {
    std::string text;
    const auto add = [&text](const std::string& name, const std::string& what) {
        text += (text.empty() ? "" : ", ") + name + what;
    };
    for (size_t i = 0; i < names.inputs.size(); ++i)
        add(names.inputs[i], args.inputs[i].cols ? shape_of(args.inputs[i].rows, args.inputs[i].cols) : " absent");
    for (size_t i = 0; i < names.weights.size(); ++i) add(names.weights[i], shape_of(args.weights[i]));
    for (size_t i = 0; i < names.tuples.size(); ++i)
        for (int32_t j = 0; j < args.tuple_length; ++j)
            add(names.tuples[i] + " " + std::to_string(j), shape_of(args.tuples[i * args.tuple_length + j]));
    for (size_t i = 0; i < names.ints.size(); ++i) add(names.ints[i], " " + std::to_string(args.ints[i]));
    add("output", shape_of(args.output.rows, args.output.cols));
    return text;
}

}  // namespace

OperandNames operand_names(const KernelSignature& signature) {
    return {split(signature.inputs), split(signature.weights), split(signature.ints), split(signature.floats),
            split(signature.tuples)};
}

void check_operand_names(const std::string& label, const OperandNames& operation, const KernelSignature& kernel) {
    const OperandNames names = operand_names(kernel);
    compare(label, "input", operation.inputs, names.inputs);
    compare(label, "weight", operation.weights, names.weights);
    compare(label, "integer", operation.ints, names.ints);
    compare(label, "float", operation.floats, names.floats);
    compare(label, "tuple of weights", operation.tuples, names.tuples);
}

void set_weights(Args& args, const std::vector<Weight>& weights, const KernelSignature& signature) {
    const size_t fixed = split(signature.weights).size(), tuples = split(signature.tuples).size();
    const size_t rest = weights.size() < fixed ? 0 : weights.size() - fixed;
    if (weights.size() < fixed || (tuples == 0 ? rest > 0 : rest % tuples > 0))
        throw std::invalid_argument(std::to_string(weights.size()) + " weights do not fit the signature " +
                                    std::string(signature.weights) + " and tuples " + signature.tuples);
    args.weights = weights.data();
    args.tuples = weights.data() + fixed;
    args.tuple_length = tuples == 0 ? 0 : static_cast<int32_t>(rest / tuples);
}

void check_operands_fit(const std::string& label, const Args& args, const KernelEntry& kernel) {
    if (!kernel.fits(args))
        throw std::invalid_argument(label + ": the operands do not fit each other: " +
                                    describe_operands(args, operand_names(*kernel.signature)));
}

}  // namespace octavo
