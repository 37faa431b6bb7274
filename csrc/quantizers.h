// Looks up quantizers by type and instruction set.
#pragma once

#include <string>
#include <vector>

#include "isa.h"
#include "quantize/quantizer.h"

namespace octavo {

// The quantizer of a ggml type for the highest level up to `level`. Throws std::invalid_argument listing all types.
const QuantizerEntry& find_quantizer(const std::string& type_name, Isa level);

std::vector<std::string> quantizer_names();

}  // namespace octavo
