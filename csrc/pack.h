// Packs matrices from their GGUF blocks, or from arrays of codes and scales, into panels (packed_weight.h).
#pragma once

#include <string>
#include <vector>

#include "packed_weight.h"

namespace octavo {

// Increment it whenever the bytes of packed matrices change: packed weights on disk are then packed again.
constexpr int32_t PACK_LAYOUT_VERSION = 5;

// A row of WEIGHT_TYPES with blocks in files. Throws std::invalid_argument naming the known types.
const WeightType& parse_weight_type(const std::string& name);

// A matrix of that type and size without its data. The type is one of GGUF, or grouped:
//     I4_128        codes of 4 bits (2, 3, 4 or 8) in groups of 128, relative to the middle code
//     I4_ROW        a group is a row
//     I4_128_Z      with zero points
//     I4_128_M      with minimums
//     I4_128_Z_F32  with scales (and minimums) of 32 bits instead of 16
//     I4_128_ORDER  with an order of the columns; ORDER8: with eight, one per expert
//     NF4_64        entries of a table, with scales of 32 bits
//     NVFP4_16      floats of 4 bits with E4M3 scales of half units, and a scale of 32 bits for each row
//     F8_E4M3, F8_E4M3_ROW, F8_E5M2_128X128    floats of 8 bits with a scale per matrix, row or block
// Throws std::invalid_argument if there is no such type or if rows are not a multiple of its block size.
PackedWeight describe_packed(const std::string& type_name, int64_t n, int64_t k);

// Files are little-endian.
inline uint16_t read_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

inline size_t order_bytes(const PackedWeight& w) { return sizeof(int32_t) * static_cast<size_t>(w.num_orders) * w.k; }
inline size_t range_bytes(const PackedWeight& w) {
    return is_dense(w.type->traits) ? 0 : static_cast<size_t>(num_panels(w)) * PANEL_COLS;
}
// The offset of the ranges, after the panels.
inline size_t ranges_at(const PackedWeight& w) {
    return static_cast<size_t>(w.panel_bytes * num_panels(w)) + (order_bytes(w) + 63) / 64 * 64;
}
inline size_t packed_bytes(const PackedWeight& w) { return ranges_at(w) + (range_bytes(w) + 63) / 64 * 64; }
// Computes the ranges of panels [begin, end), packed in `out`, and writes them after all panels (pack_ranges.cpp).
void write_ranges(const PackedWeight& w, uint8_t* out, int32_t begin, int32_t end);
// Sets `ranges` to those stored with `data`.
inline void find_ranges(PackedWeight& w) {
    w.ranges = range_bytes(w) ? reinterpret_cast<const int8_t*>(w.data + ranges_at(w)) : nullptr;
}

// Sets `order` to the orders stored with `data`. Returns their ids, which the caller must keep. Throws
// std::invalid_argument if an order contains a column that does not exist.
std::vector<uint64_t> find_orders(PackedWeight& w);

// An expanded quantized block of one column: one code per byte, scales in header order.
struct BlockCodes {
    uint8_t codes[256];
    uint16_t scale, min;  // float16, or an exponent
    uint8_t scales[16];   // of units or half units; E4M3 for types whose scales are not in the header
    uint8_t mins[8];
};

// Reads one block in the file's layout (pack_blocks.cpp). wants_codes: whether to also read the codes of 4-bit types.
void decode_block(const WeightType& type, const uint8_t* block, bool wants_codes, BlockCodes& out);

// The codes of one unit: one per byte, in quads; and as stored in a panel.
using UnitCodes = uint8_t[QUADS * QUAD_BYTES];
void write_unit(int bits, const UnitCodes& codes, uint8_t* out);

// Packs one panel of a type whose codes are indices into a grid (pack_grids.cpp).
void pack_grid_panel(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel);

// Packs the panels [begin, end) of a matrix [w.n, w.k] from `source` (rows of blocks, contiguous) into `out`.
void pack_panels(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t begin, int32_t end);

// The arrays of a grouped matrix. The codes of a row are stored without gaps, from the lowest bits up.
struct ByteArray {
    const uint8_t* data;
    size_t size;
};
struct GroupArrays {
    int32_t bits;  // per stored code: the bits of the type, or 5 to 8 for 8-bit integers
    int32_t zero;  // the code of zero, for types without zero points and minimums: the middle, or any if below 8 bits
    ByteArray codes;   // [n, k * bits / 8]
    ByteArray scales;  // [n, groups], groups.scale_bytes each
    ByteArray mins;    // [n, groups], groups.min_bytes each; for NVFP4_16 the E4M3 scales, [n, k / 16]
    ByteArray orders;  // int32 [w.num_orders, k]
};
// Throws std::invalid_argument naming the array that does not fit the matrix.
void check_groups(const PackedWeight& w, const std::string& type_name, const GroupArrays& source);
void pack_groups(const PackedWeight& w, const GroupArrays& source, uint8_t* out);

// Packs one panel of a type with exponents (pack_float8.cpp).
void pack_float8_panel(const PackedWeight& w, const GroupArrays& source, int32_t panel, uint8_t* out);

}  // namespace octavo
