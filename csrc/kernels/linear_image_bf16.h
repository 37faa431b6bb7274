// The activations as the AMX kernels read them: bfloat16, times 2^ACTIVATION_EXPONENT, in groups of 16 rows.
//
// A group of r rows (or the remaining rows in the last group) is one stream over the units. A unit has r rows of 32
// values, in which the middle two of every four are swapped to match the order of unpacked weights (linear_amx.h).
#pragma once

#include "linear_format.h"

namespace octavo {
namespace {

constexpr int ROW_GROUP = 16;
constexpr int ROW_UNIT_BYTES = 2 * UNIT_K;  // for one row and one unit
// Unpacked weights have the exponents of float16 in bfloat16, which makes them 2^112 times too small. Sums of products
// with these activations are 2^32 times too small. That leaves room for products down to 2^-94 and activations up to
// 2^48.
constexpr int ACTIVATION_EXPONENT = 80, UNPACKED_EXPONENT = -112;

struct ImageGroup {
    uint8_t* data;
    int rows;

    uint8_t* unit(int u) const { return data + static_cast<int64_t>(u) * rows * ROW_UNIT_BYTES; }
};

// All rows of a step's activations. Groups are a fixed distance apart.
struct Image {
    uint8_t* data;
    int32_t rows, units;

    // Tiles are loaded with 16 rows, even if the group has fewer.
    static constexpr int64_t SLACK_BYTES = IMAGE_SLACK_BYTES;
    static_assert(SLACK_BYTES >= ROW_GROUP * ROW_UNIT_BYTES, "the slack");
    static int64_t bytes(int64_t rows, int64_t k) { return rows * (k / UNIT_K) * ROW_UNIT_BYTES + SLACK_BYTES; }
    ImageGroup group(int32_t g) const {
        const int32_t first = g * ROW_GROUP;
        const int count = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        return {data + static_cast<int64_t>(first) * units * ROW_UNIT_BYTES, count};
    }
    // order: the columns of x in the order of the codes, or null.
    void quantize_row(const float* x, int32_t row, const int32_t* order) const {
        for (int u = 0; u < units; ++u) {
            const int32_t* const columns = order + u * UNIT_K;
            const auto half = [&](int i) {
                return F32x16{order ? _mm512_i32gather_ps(_mm512_loadu_si512(columns + 16 * i), x, 4)
                                    : _mm512_loadu_ps(x + u * UNIT_K + 16 * i)};
            };
            write_unit(half(0), half(1), row, u);
        }
    }
    // Writes one unit of a row.
    void write_unit(F32x16 low, F32x16 high, int32_t row, int u) const {
        static_assert(ACTIVATION_EXPONENT == 80, "the factor");
        const F32x16 factor = broadcast(0x1p80f);
        const __m512i middle_swapped =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
        const __m512i pairs = round_to_bf16((low * factor).v, (high * factor).v);
        _mm512_storeu_si512(group(row / ROW_GROUP).unit(u) + ROW_UNIT_BYTES * (row % ROW_GROUP),
                            _mm512_shuffle_epi8(pairs, middle_swapped));
    }

  private:
    static __m512i round_to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
};

}  // namespace
}  // namespace octavo
