#include "signature.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace octavo {
namespace {

// "(a, b)" as a and b.
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
        throw std::invalid_argument(std::to_string(weights.size()) + " weights do not fit " +
                                    std::string(signature.weights) + " and tuples " + signature.tuples);
    args.weights = weights.data();
    args.tuples = weights.data() + fixed;
    args.tuple_length = tuples == 0 ? 0 : static_cast<int32_t>(rest / tuples);
}

}  // namespace octavo
