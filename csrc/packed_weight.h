// The memory layout of weight matrices for the linear kernels, the same on every instruction set.
//
// A matrix [n, k] (n output features) is divided into panels of 16 output columns. A panel is one sequential stream
// over k. The last panel is padded with columns whose scales are zero.
//
// Dense types: for each k, 16 numbers.
// Quantized types: super-blocks of 32 to 256 values of k. A super-block is a header (scales of all its units, 16
// columns side by side) followed by its units of 32 k. The codes of a unit form eight quads. Quad q has, for 16
// columns, the four consecutive values k = 4q .. 4q+3 (64 codes, column-major: VNNI order), split into planes:
//   nibbles   4 x 64 bytes: chunk c has quad 2c in the low and quad 2c+1 in the high nibbles
//   pairs     2 x 64 bytes: chunk c has quads 4c .. 4c+3, two bits each, from the lowest bits up
//   bits      64 bytes: bit q belongs to quad q
//   triples   2 x 3 x 64 bytes: the i-th 64 bytes of chunk c have quad 4c+i in their low six bits (i = 0, 1, 2) and
//             bits 2i and 2i+1 of quad 4c+3 above them
//   bytes     8 x 64 bytes, signed
// 1-bit codes are stored as bits, 2 as pairs, 3 as pairs and bits, 4 as nibbles, 5 as nibbles and bits, 6 as triples, 8
// as bytes. Codes that are indices into a grid (Codes::grid) have special planes, for quads 2p and 2p + 1 together:
//   low       64 bytes: byte 16 p + column is the low byte of the index
//   second    64 bytes, grids of four values: the index of quad 2p + 1 likewise
//   high      the bits above: 2 each in 16 bytes, pair p at bit 2p; or 4 each in 2 x 16 bytes, pair p at bit 4 (p % 2)
//   signs     64 bytes: bit 4 column + i of the 8 bytes of a quad belongs to its i-th value
// A header consists of arrays of 16 columns: the scale (32 bytes, e8m0: 16), the minimum (32 bytes), then 16 bytes for
// the scale of each unit or half unit and 16 bytes for the minimum of each unit. The traits determine which of them
// exist. E4M3 scales of half units are in the unit instead, 2 x 16 bytes after its codes; exponents of units likewise,
// 16 bytes.
// Grouped types: a super-block is a group, whose width is a property of the matrix (Groups). Its header has the scale
// and, if there are any, zero points or minimums, whose widths are also properties of the matrix. The last group may be
// narrower if its type has exponents.
//
// After the panels come the orders of columns, if a matrix has any, and the ranges of quantized types (PackedWeight).
//
// A weight type is a row of WEIGHT_TYPES. Types with equal PanelTraits share their compiled kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "iq_grids.h"

namespace octavo {

// Stored numbers and their values w. Codes u are unsigned.
enum class Codes : uint8_t {
    f32,
    f16,
    bf16,
    plain,         // w = u
    offset,        // w = u - zero
    bytes,         // w = u, signed
    offset_table,  // w = table[u] - zero, with small nonnegative values
    byte_table,    // w = table[u], signed bytes
    grid,          // w = +- one value of a grid vector in the table, signed bytes; u is the index of the vector
};

// Factors of w. Half a unit is 16 k.
enum class Scales : uint8_t {
    none,
    f16,          // per super-block
    e8m0,         // 2^(e - 128) per super-block; the code table has doubled values
    u8_per_unit,  // f16 per super-block times a byte per unit
    i8_per_unit,
    u4_per_half_unit,  // f16 per super-block times the low nibble of a byte per half unit
    i8_per_half_unit,
    odd_u4_per_half_unit,  // f16 per super-block times 2 n + 1; n: the low, then the high nibble of a byte per unit
    group,                 // f16 or f32 per group, depending on Groups
    group_e4m3,            // the same times an unsigned E4M3 per half unit
    group_exponents,       // the same times 2^(e - 127), e: a byte per unit
};

// Minimums, which are added to the scaled w.
enum class Mins : uint8_t {
    none,
    f16,               // per super-block
    u8_per_unit,       // minus f16 per super-block times a byte per unit
    u4_per_half_unit,  // the same times the high nibble of the byte that has the scale
    group,             // minus the scale times a byte per group, or f16 or f32, depending on Groups
};

// Everything that kernels are specialized for.
struct PanelTraits {
    Codes codes;
    int32_t bits;  // per stored number; 1: the code counts twice. For a grid 1, 2 or 3 selects its planes (unit_bytes)
    int32_t block_k;  // values of k in a super-block; 0: Groups::k
    Scales scales = Scales::none;
    Mins mins = Mins::none;
};

// The layout of a block in a file (pack_blocks.cpp).
enum class FileBlock : uint8_t {
    values,  // a plain number
    simple,  // scale, minimum, fifth bits and codes in this order, as far as the traits have them
    q2_k,
    q3_k,
    q4_k,
    q6_k,
    iq4_xs,
    iq3_s,
    tq1_0,
    tq2_0,
    q1_0,
    q2_0,
    nvfp4,
    iq1_s,  // from here on: indices into grids (pack_grids.cpp)
    iq1_m,
    iq2_xxs,
    iq2_xs,
    iq2_s,
    iq3_xxs,
    none,  // from here on: given as arrays (pack_groups.cpp)
    e4m3,  // 8-bit floats, one per byte (pack_float8.cpp)
    e5m2,
};

struct WeightType {
    const char* name;  // in GGUF files; for grouped types the start of a name
    FileBlock file;
    int32_t file_bytes;  // per block
    PanelTraits traits;
    int32_t zero = 0;
    const int8_t* table = nullptr;  // [16]; or the vectors of a grid, of 8 values, or of 4 if `bits` is 3
    float table_factor = 1.0f;      // for grouped types and grids: codes stand for table / factor
    int32_t file_values = 0;        // for grouped types: values per block in a file
};

// The super-blocks of a grouped type. All zero for other types.
struct Groups {
    int32_t k = 0;            // values per super-block; for integers a multiple of UNIT_K
    int32_t scale_bytes = 0;  // 2: f16, 4: f32
    int32_t min_bytes = 0;    // 1: zero points, otherwise minimums as wide as the scales; 0: neither
};

struct PackedWeight {
    const WeightType* type;
    int32_t n, k;
    Groups groups;
    int64_t panel_bytes;  // a multiple of 64
    const uint8_t* data;  // 64-byte aligned
    // Column j of the codes is column order[j] of the matrix; null: no reordering. Matrices of several experts,
    // [num_orders, n / num_orders, k], have one order per expert, after the panels. Equal orders have equal ids.
    const int32_t* order = nullptr;  // [num_orders, k]
    const uint64_t* order_id = nullptr;
    int32_t num_orders = 0;
    // For each column of the panels: every scale times 2^code_room(traits), and every minimum, is at most 2^range; or
    // RANGE_NOT_FINITE. Null for dense types.
    const int8_t* ranges = nullptr;  // [num_panels][16]
};

// Kernels and packers are compiled separately and must not share functions across instruction sets.
namespace {

constexpr int RANGE_NOT_FINITE = 127;  // some scale or minimum is NaN or infinite
constexpr int PANEL_COLS = 16;
constexpr int UNIT_K = 32;
constexpr int UNIT_PANELS = UNIT_K / PANEL_COLS;  // panels whose columns form one unit of the next product
constexpr int QUADS = 8;
constexpr int QUAD_BYTES = 64;                // one quad of byte codes
constexpr int TRIPLE_BYTES = 3 * QUAD_BYTES;  // a chunk of triples: four quads

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Floats with two exponent bits and one mantissa bit, doubled, plus 12.
constexpr int8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// Odd numbers from -15 to 15, plus 15.
constexpr int8_t ODD_VALUES[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
// The tables of NF4 and FP4 (bitsandbytes), rounded. The factors minimize the squared error; scales are divided by
// them. No entry is off by more than 0.39 % (0.32 %) of the largest; the root mean square error is 0.18 % (0.12 %).
constexpr float NF4_FACTOR = 112.03f, FP4_FACTOR = 120.0f;
constexpr int8_t NF4_VALUES[16] = {-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112};
constexpr int8_t FP4_VALUES[16] = {0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30};

constexpr PanelTraits IQ1_TRAITS = {Codes::grid, 1, 256, Scales::odd_u4_per_half_unit};
constexpr PanelTraits IQ2_TRAITS = {Codes::grid, 2, 256, Scales::odd_u4_per_half_unit};
constexpr PanelTraits IQ3_TRAITS = {Codes::grid, 3, 256, Scales::odd_u4_per_half_unit};
constexpr PanelTraits NVFP4_TRAITS = {Codes::offset_table, 4, 0, Scales::group_e4m3};

constexpr WeightType WEIGHT_TYPES[] = {
    {"F32", FileBlock::values, 4, {Codes::f32, 32, 1}},
    {"F16", FileBlock::values, 2, {Codes::f16, 16, 1}},
    {"BF16", FileBlock::values, 2, {Codes::bf16, 16, 1}},
    {"Q4_0", FileBlock::simple, 18, {Codes::offset, 4, 32, Scales::f16}, 8},
    {"Q4_1", FileBlock::simple, 20, {Codes::plain, 4, 32, Scales::f16, Mins::f16}},
    {"Q5_0", FileBlock::simple, 22, {Codes::offset, 5, 32, Scales::f16}, 16},
    {"Q5_1", FileBlock::simple, 24, {Codes::plain, 5, 32, Scales::f16, Mins::f16}},
    {"Q8_0", FileBlock::simple, 34, {Codes::bytes, 8, 32, Scales::f16}},
    {"Q2_K", FileBlock::q2_k, 84, {Codes::plain, 2, 256, Scales::u4_per_half_unit, Mins::u4_per_half_unit}},
    {"Q3_K", FileBlock::q3_k, 110, {Codes::offset, 3, 256, Scales::i8_per_half_unit}, 4},
    {"Q4_K", FileBlock::q4_k, 144, {Codes::plain, 4, 256, Scales::u8_per_unit, Mins::u8_per_unit}},
    {"Q5_K", FileBlock::q4_k, 176, {Codes::plain, 5, 256, Scales::u8_per_unit, Mins::u8_per_unit}},
    {"Q6_K", FileBlock::q6_k, 210, {Codes::offset, 6, 256, Scales::i8_per_half_unit}, 32},
    {"IQ4_NL", FileBlock::simple, 18, {Codes::byte_table, 4, 32, Scales::f16}, 0, IQ4_VALUES},
    {"IQ4_XS", FileBlock::iq4_xs, 136, {Codes::byte_table, 4, 256, Scales::i8_per_unit}, 0, IQ4_VALUES},
    {"MXFP4", FileBlock::simple, 17, {Codes::offset_table, 4, 32, Scales::e8m0}, 12, E2M1_VALUES},
    {"IQ3_S", FileBlock::iq3_s, 110, {Codes::offset_table, 4, 256, Scales::u8_per_unit}, 15, ODD_VALUES},
    {"IQ1_S", FileBlock::iq1_s, 50, IQ1_TRAITS, 0, IQ1_GRID.values, 8.0f},
    {"IQ1_M", FileBlock::iq1_m, 56, IQ1_TRAITS, 0, IQ1_GRID.values, 8.0f},
    {"IQ2_XXS", FileBlock::iq2_xxs, 66, IQ2_TRAITS, 0, IQ2_XXS_GRID.values, 8.0f},
    {"IQ2_XS", FileBlock::iq2_xs, 74, IQ2_TRAITS, 0, IQ2_XS_GRID.values, 8.0f},
    {"IQ2_S", FileBlock::iq2_s, 82, IQ2_TRAITS, 0, IQ2_S_GRID.values, 8.0f},
    {"IQ3_XXS", FileBlock::iq3_xxs, 98, IQ3_TRAITS, 0, IQ3_XXS_GRID.values, 4.0f},
    {"TQ1_0", FileBlock::tq1_0, 54, {Codes::offset, 2, 0, Scales::group}, 1, nullptr, 1.0f, 256},
    {"TQ2_0", FileBlock::tq2_0, 66, {Codes::offset, 2, 0, Scales::group}, 1, nullptr, 1.0f, 256},
    {"Q1_0", FileBlock::q1_0, 18, {Codes::offset, 1, 0, Scales::group}, 1, nullptr, 1.0f, 128},
    {"Q2_0", FileBlock::q2_0, 18, {Codes::offset, 2, 0, Scales::group}, 1, nullptr, 1.0f, 64},
    {"NVFP4", FileBlock::nvfp4, 36, NVFP4_TRAITS, 12, E2M1_VALUES, 2.0f, 64},
    {"NVFP4_16", FileBlock::none, 0, NVFP4_TRAITS, 12, E2M1_VALUES, 2.0f},
    {"I2", FileBlock::none, 0, {Codes::offset, 2, 0, Scales::group}, 2},
    {"I3", FileBlock::none, 0, {Codes::offset, 3, 0, Scales::group}, 4},
    {"I4", FileBlock::none, 0, {Codes::offset, 4, 0, Scales::group}, 8},
    {"I8", FileBlock::none, 0, {Codes::bytes, 8, 0, Scales::group}},
    {"I2", FileBlock::none, 0, {Codes::plain, 2, 0, Scales::group, Mins::group}},
    {"I3", FileBlock::none, 0, {Codes::plain, 3, 0, Scales::group, Mins::group}},
    {"I4", FileBlock::none, 0, {Codes::plain, 4, 0, Scales::group, Mins::group}},
    {"I8", FileBlock::none, 0, {Codes::bytes, 8, 0, Scales::group, Mins::group}},
    {"NF4", FileBlock::none, 0, {Codes::byte_table, 4, 0, Scales::group}, 0, NF4_VALUES, NF4_FACTOR},
    {"F8_E4M3", FileBlock::e4m3, 0, {Codes::bytes, 8, 0, Scales::group_exponents}},
    {"F8_E5M2", FileBlock::e5m2, 0, {Codes::bytes, 8, 0, Scales::group_exponents}},
    {"FP4", FileBlock::none, 0, {Codes::byte_table, 4, 0, Scales::group}, 0, FP4_VALUES, FP4_FACTOR},
};
constexpr int NUM_WEIGHT_TYPES = sizeof(WEIGHT_TYPES) / sizeof(WEIGHT_TYPES[0]);

constexpr bool operator==(const PanelTraits& a, const PanelTraits& b) {
    return a.codes == b.codes && a.bits == b.bits && a.block_k == b.block_k && a.scales == b.scales && a.mins == b.mins;
}

constexpr bool comes_as_arrays(const WeightType& type) { return type.file >= FileBlock::none; }
constexpr bool is_dense(const PanelTraits& t) { return t.codes <= Codes::bf16; }
constexpr bool has_table(const PanelTraits& t) {
    return t.codes == Codes::offset_table || t.codes == Codes::byte_table;
}
constexpr bool is_grid(const PanelTraits& t) { return t.codes == Codes::grid; }
constexpr bool has_zero(const PanelTraits& t) { return t.codes == Codes::offset || t.codes == Codes::offset_table; }
// Whether codes are signed bytes. All other codes are unsigned and below 64.
constexpr bool is_wide(const PanelTraits& t) {
    return t.codes == Codes::bytes || t.codes == Codes::byte_table || t.codes == Codes::grid;
}
constexpr bool has_e4m3_scales(const PanelTraits& t) { return t.scales == Scales::group_e4m3; }
constexpr bool has_exponents(const PanelTraits& t) { return t.scales == Scales::group_exponents; }
constexpr bool has_half_scales(const PanelTraits& t) {
    return (t.scales >= Scales::u4_per_half_unit && t.scales <= Scales::odd_u4_per_half_unit) || has_e4m3_scales(t);
}
constexpr bool is_grouped(const PanelTraits& t) { return t.scales >= Scales::group; }
// Whether super-blocks are summed in integers (kernels/linear_format.h): Q3_K, Q4_K, Q5_K, Q6_K.
constexpr bool sums_blocks(const PanelTraits& t) {
    if (t.codes == Codes::plain) return t.scales == Scales::u8_per_unit && t.mins == Mins::u8_per_unit;
    return t.codes == Codes::offset && t.scales == Scales::i8_per_half_unit;
}
// Whether a group's scale is applied to finished sums if the group is a whole column: W8A8, LLM.int8().
constexpr bool may_scale_columns(const PanelTraits& t) {
    return t.codes == Codes::bytes && t.scales == Scales::group && t.mins == Mins::none;
}
// The number of bits of a code in the AMX kernels, which multiply it by its scale in float16.
constexpr int code_room(const PanelTraits& t) {
    if (is_grid(t) && t.bits == 1) return 5;
    if (is_wide(t) || t.bits == 6) return 8;
    return has_table(t) ? 5 : t.bits == 1 ? 2 : t.bits;
}
// Values per block of a file.
constexpr int32_t block_values(const WeightType& type) {
    return is_grouped(type.traits) ? type.file_values : type.traits.block_k;
}

// Except for unit_bytes, the sizes from here to block_bytes apply only to types that are not grouped.
constexpr int units(const PanelTraits& t) { return t.block_k / UNIT_K; }
// Number of byte scales and byte minimums in a super-block.
constexpr int byte_scales(const PanelTraits& t) {
    if (t.scales < Scales::u8_per_unit || is_grouped(t)) return 0;
    return units(t) * (has_half_scales(t) && t.scales != Scales::odd_u4_per_half_unit ? 2 : 1);
}
constexpr int byte_mins(const PanelTraits& t) { return t.mins == Mins::u8_per_unit ? units(t) : 0; }
// Offsets of the minimum, the byte scales and the byte minimums in a header.
constexpr int min_at(const PanelTraits& t) {
    return PANEL_COLS * (t.scales == Scales::none ? 0 : t.scales == Scales::e8m0 ? 1 : 2);
}
constexpr int byte_scales_at(const PanelTraits& t) { return min_at(t) + (t.mins == Mins::none ? 0 : PANEL_COLS * 2); }
constexpr int byte_mins_at(const PanelTraits& t) { return byte_scales_at(t) + PANEL_COLS * byte_scales(t); }
constexpr int header_bytes(const PanelTraits& t) { return byte_mins_at(t) + PANEL_COLS * byte_mins(t); }
// Bytes per unit: the codes (for a grid low and high, with signs, or second and signs), and codes with their scales.
constexpr int code_bytes(const PanelTraits& t) {
    if (is_grid(t)) return t.bits == 1 ? 64 + 32 : t.bits == 2 ? 64 + 16 + 64 : 64 + 64 + 64;
    return PANEL_COLS * UNIT_K * t.bits / 8;
}
constexpr int unit_bytes(const PanelTraits& t) {
    return code_bytes(t) + PANEL_COLS * (has_e4m3_scales(t) ? 2 : has_exponents(t) ? 1 : 0);
}
constexpr int block_bytes(const PanelTraits& t) {
    return header_bytes(t) + (is_dense(t) ? PANEL_COLS * t.block_k * t.bits / 8 : units(t) * unit_bytes(t));
}
constexpr int32_t num_groups(const Groups& g, int32_t k) { return (k + g.k - 1) / g.k; }
constexpr int header_bytes(const Groups& g) { return PANEL_COLS * (g.scale_bytes + g.min_bytes); }

// Whether kernels support the traits: their planes, and 16-bit sums without overflow (linear_avx2.h, linear_neon.h).
constexpr bool is_computable(const WeightType& type) {
    const PanelTraits& t = type.traits;
    if (is_dense(t)) return t.block_k == 1 && t.scales == Scales::none && t.mins == Mins::none;
    const bool planes = t.codes == Codes::bytes ? t.bits == 8
                        : has_table(t)          ? t.bits == 4
                        : is_grid(t)            ? t.bits >= 1 && t.bits <= 3
                                                : t.bits >= (t.codes == Codes::offset ? 1 : 2) && t.bits <= 6;
    const bool block = is_grouped(t) ? t.block_k == 0 && (t.mins == Mins::none || t.mins == Mins::group) &&
                                           type.file_values % UNIT_K == 0
                                     : t.block_k % UNIT_K == 0 && t.block_k >= UNIT_K && t.block_k <= 256 &&
                                           t.scales != Scales::none && t.mins != Mins::group;
    const bool constants = has_zero(t) == (type.zero != 0) && (has_table(t) || is_grid(t)) == (type.table != nullptr);
    // Minimums of half units use the terms that zero points would need.
    const bool half_units = t.mins == Mins::u4_per_half_unit
                                ? t.scales == Scales::u4_per_half_unit && t.codes == Codes::plain
                                : is_grid(t) == (t.scales == Scales::odd_u4_per_half_unit) &&
                                      (is_grid(t) || !(has_half_scales(t) && is_wide(t)));
    if (!planes || !block || !constants || !half_units) return false;
    if (is_wide(t)) return true;
    int least = 0, largest = (1 << t.bits) - 1;
    for (int i = 0; has_table(t) && i < 16; ++i) {
        least = i == 0 || type.table[i] < least ? type.table[i] : least;
        largest = i == 0 || type.table[i] > largest ? type.table[i] : largest;
    }
    const int reach = largest - type.zero > type.zero ? largest - type.zero : type.zero;
    return least >= 0 && reach <= (has_zero(t) && !has_half_scales(t) ? 16 : 32);
}
constexpr bool all_computable() {
    for (const WeightType& type : WEIGHT_TYPES)
        if (!is_computable(type)) return false;
    return true;
}
static_assert(all_computable());

constexpr int64_t packed_panel_bytes(const PanelTraits& t, const Groups& groups, int32_t k) {
    const int64_t bytes = is_grouped(t) ? static_cast<int64_t>(num_groups(groups, k)) * header_bytes(groups) +
                                              static_cast<int64_t>(k / UNIT_K) * unit_bytes(t)
                                        : static_cast<int64_t>(k / t.block_k) * block_bytes(t);
    return (bytes + 63) / 64 * 64;
}

constexpr int32_t num_panels(const PackedWeight& w) { return (w.n + PANEL_COLS - 1) / PANEL_COLS; }

}  // namespace
}  // namespace octavo
