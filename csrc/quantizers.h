// The quantizers by type and instruction set.
#pragma once

#include <string>
#include <vector>

#include "isa.h"
#include "quantize/quantizer.h"

namespace octavo {

// The best entry of a ggml type at or below a level. Throws std::invalid_argument naming the types there are.
const QuantizerEntry& find_quantizer(const std::string& type_name, Isa level);

std::vector<std::string> quantizer_names();

}  // namespace octavo
