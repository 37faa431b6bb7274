// Packs matrices from their GGUF blocks into panels (packed_weight.h).
#pragma once

#include <string>
#include <vector>

#include "packed_weight.h"

namespace octavo {

// Changes whenever the bytes of a packed matrix do: packed weights that were kept on disk are then packed anew.
constexpr int32_t PACK_LAYOUT_VERSION = 2;

// A row of WEIGHT_TYPES. Throws std::invalid_argument naming the known types.
const WeightType& parse_weight_type(const std::string& name);

// A quantized block of one column, spread out: codes one a byte, scales in header order.
struct BlockCodes {
    uint8_t codes[256];
    uint16_t scale, min;  // float16, or an exponent
    uint8_t scales[16];   // of units or half units
    uint8_t mins[8];
};

// Reads one block in the file's layout (pack_blocks.cpp). wants_codes: also the codes of types with 4 bits a code.
void decode_block(const WeightType& type, const uint8_t* block, bool wants_codes, BlockCodes& out);

// Packs the panels [begin, end) of a matrix [w.n, w.k] from `source` (rows of blocks, contiguous) into `out`.
void pack_panels(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t begin, int32_t end);

}  // namespace octavo
