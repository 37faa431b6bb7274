// How weight matrices lie in memory for the linear kernels. One geometry on every instruction set.
//
// A matrix [n, k] (n output features) is cut into panels of 16 output columns; a panel is one sequential stream
// over k. The last panel is padded with columns whose scales are zero.
//
// Dense types: for each k, 16 numbers.
// Quantized types: super-blocks of 32 or 256 values of k. A super-block is a header (scales of all its units, 16
// columns side by side) followed by its units of 32 k. In a unit the codes form eight quads; quad q holds, for
// 16 columns, the four consecutive values k = 4q .. 4q+3 (64 codes, column-major: VNNI order), cut into planes:
//   nibbles   4 x 64 bytes: chunk c has quad 2c in the low and quad 2c+1 in the high nibbles
//   pairs     2 x 64 bytes: chunk c has quads 4c .. 4c+3, two bits each, from the lowest bits up
//   bits      64 bytes: bit q belongs to quad q
//   triples   2 x 3 x 64 bytes: the i-th 64 bytes of chunk c have quad 4c+i in their low six bits (i = 0, 1, 2) and
//             bits 2i and 2i+1 of quad 4c+3 above them
//   bytes     8 x 64 bytes, signed
// Q8_0 has bytes, Q6_K triples, Q2_K pairs, Q3_K pairs and bits; all others have nibbles, those of five bits also bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class WeightType : int32_t {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
};

struct PackedWeight {
    WeightType type;
    int32_t n, k;
    int64_t panel_bytes;  // a multiple of 64
    const uint8_t* data;  // 64-byte aligned
};

// Kernels and packers are compiled apart and must not share functions across instruction sets.
namespace {

constexpr int PANEL_COLS = 16;
constexpr int UNIT_K = 32;
constexpr int QUADS = 8;
constexpr int QUAD_BYTES = 64;                // one quad of byte codes
constexpr int TRIPLE_BYTES = 3 * QUAD_BYTES;  // a chunk of triples: four quads
constexpr int NUM_WEIGHT_TYPES = 16;

struct PanelLayout {
    int block_k;       // values of k in a super-block
    int header_bytes;  // scales of a super-block
    int unit_bytes;    // codes of one unit
    int file_bytes;    // bytes of one block in a GGUF file

    constexpr int units() const { return block_k / UNIT_K; }
    constexpr int block_bytes() const { return header_bytes + units() * unit_bytes; }
};

// Headers: d and m are 16 halves (32 bytes), scales and mins of units or half units 16 bytes each.
//   Q4_0 Q5_0 Q8_0 IQ4_NL: d            Q4_1 Q5_1: d, m           MXFP4: 16 exponents
//   Q4_K Q5_K: d, dmin, scales[8], mins[8]                        IQ4_XS: d, scales[8] (signed)
//   Q3_K Q6_K: d, scales[16] (signed)   Q2_K: d, dmin, scales[16] (low nibble) with mins (high nibble)
constexpr PanelLayout panel_layout(WeightType type) {
    switch (type) {
        case WeightType::Q4_0:
            return {32, 32, 256, 18};
        case WeightType::Q4_1:
            return {32, 64, 256, 20};
        case WeightType::Q5_0:
            return {32, 32, 320, 22};
        case WeightType::Q5_1:
            return {32, 64, 320, 24};
        case WeightType::Q8_0:
            return {32, 32, 512, 34};
        case WeightType::Q2_K:
            return {256, 320, 128, 84};
        case WeightType::Q3_K:
            return {256, 288, 192, 110};
        case WeightType::Q4_K:
            return {256, 320, 256, 144};
        case WeightType::Q5_K:
            return {256, 320, 320, 176};
        case WeightType::Q6_K:
            return {256, 288, 384, 210};
        case WeightType::IQ4_NL:
            return {32, 32, 256, 18};
        case WeightType::IQ4_XS:
            return {256, 160, 256, 136};
        case WeightType::MXFP4:
            return {32, 16, 256, 17};
        case WeightType::F32:
            return {1, 0, 64, 4};
        default:
            return {1, 0, 32, 2};
    }
}

constexpr bool is_dense(WeightType type) { return type <= WeightType::BF16; }

constexpr int64_t packed_panel_bytes(WeightType type, int32_t k) {
    const PanelLayout l = panel_layout(type);
    const int64_t block = is_dense(type) ? l.unit_bytes : l.block_bytes();
    return (k / l.block_k * block + 63) / 64 * 64;
}

constexpr int32_t num_panels(const PackedWeight& w) { return (w.n + PANEL_COLS - 1) / PANEL_COLS; }

// Signed values of the 4-bit codes of IQ4_NL and IQ4_XS, and of MXFP4 (E2M1, doubled) plus 12.
constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace
}  // namespace octavo
