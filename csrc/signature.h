// Operand names of kernels and operations, and their comparison.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace octavo {

struct OperandNames {
    std::vector<std::string> inputs, weights, ints, floats, tuples;
};

// Parses the text written by OCTAVO_SIGNATURE.
OperandNames operand_names(const KernelSignature& signature);

// Throws std::invalid_argument naming `label` and the first field of `operation` that the kernel expects elsewhere.
void check_operand_names(const std::string& label, const OperandNames& operation, const KernelSignature& kernel);

// Points `args` at weights in the order of a signature, with its tuples last. Throws std::invalid_argument if there are
// too few weights or the tuples differ in length.
void set_weights(Args& args, const std::vector<Weight>& weights, const KernelSignature& signature);

// Throws std::invalid_argument naming `label` and all operands unless their shapes match (KernelEntry::fits).
void check_operands_fit(const std::string& label, const Args& args, const KernelEntry& kernel);

}  // namespace octavo
