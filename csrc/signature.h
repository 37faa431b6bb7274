// Names of the operands of kernels and operations, and their comparison.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace octavo {

struct OperandNames {
    std::vector<std::string> inputs, weights, ints, floats, tuples;
};

// Reads what OCTAVO_SIGNATURE wrote.
OperandNames operand_names(const KernelSignature& signature);

// Throws std::invalid_argument naming `label` and the first field of `operation` that is not where the kernel reads it.
void check_operand_names(const std::string& label, const OperandNames& operation, const KernelSignature& kernel);

// Points `args` at weights in the order of a signature, its tuples after the others. Throws std::invalid_argument if
// there are too few or the tuples differ in length.
void set_weights(Args& args, const std::vector<Weight>& weights, const KernelSignature& signature);

// Throws std::invalid_argument naming `label` and all operands unless they fit each other (KernelEntry::fits).
void check_operands_fit(const std::string& label, const Args& args, const KernelEntry& kernel);

}  // namespace octavo
