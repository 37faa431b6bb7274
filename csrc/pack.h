// Packs matrices from their GGUF blocks, or from arrays of codes and scales, into panels (packed_weight.h).
#pragma once

#include <string>
#include <vector>

#include "packed_weight.h"

namespace octavo {

// Changes whenever the bytes of a packed matrix do: packed weights that were kept on disk are then packed anew.
constexpr int32_t PACK_LAYOUT_VERSION = 2;

// A row of WEIGHT_TYPES with blocks in files. Throws std::invalid_argument naming the known types.
const WeightType& parse_weight_type(const std::string& name);

// A matrix of that type and size without its data. Types are those of GGUF files, or grouped:
//     I4_128        codes of 4 bits (2, 3, 4 or 8) in groups of 128, about the code in the middle
//     I4_ROW        a group is a row
//     I4_128_Z      with zero points
//     I4_128_M      with minimums
//     I4_128_Z_F32  with scales (and minimums) of 32 bits instead of 16
// Throws std::invalid_argument if there is no such type or if rows do not divide into its blocks.
PackedWeight describe_packed(const std::string& type_name, int64_t n, int64_t k);
inline size_t packed_bytes(const PackedWeight& w) { return static_cast<size_t>(w.panel_bytes * num_panels(w)); }

// A quantized block of one column, spread out: codes one a byte, scales in header order.
struct BlockCodes {
    uint8_t codes[256];
    uint16_t scale, min;  // float16, or an exponent
    uint8_t scales[16];   // of units or half units
    uint8_t mins[8];
};

// Reads one block in the file's layout (pack_blocks.cpp). wants_codes: also the codes of types with 4 bits a code.
void decode_block(const WeightType& type, const uint8_t* block, bool wants_codes, BlockCodes& out);

// The codes of one unit, one a byte, in quads; and as they lie in a panel.
using UnitCodes = uint8_t[QUADS * QUAD_BYTES];
void write_unit(int bits, const UnitCodes& codes, uint8_t* out);

// Packs the panels [begin, end) of a matrix [w.n, w.k] from `source` (rows of blocks, contiguous) into `out`.
void pack_panels(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t begin, int32_t end);

// The arrays of a grouped matrix. Codes of a row follow each other without gaps, from the lowest bits up.
struct GroupArrays {
    int32_t bits;           // of a stored code: those of the type, or 5 to 8 for the type with 8
    int32_t zero;           // the code of zero, for types without zero points and minimums: the middle, or any below 8
    const uint8_t* codes;   // [n, k * bits / 8]
    const uint8_t* scales;  // [n, groups], of groups.scale_bytes each
    const uint8_t* mins;    // [n, groups], of groups.min_bytes each; or null
};
void pack_groups(const PackedWeight& w, const GroupArrays& source, uint8_t* out);

}  // namespace octavo
