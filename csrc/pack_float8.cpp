// Packs 8-bit floats as signed bytes times a power of two for each unit, so that their products are integer products.
// The largest number in a unit has a code of 64 to 120 (E5M2: to 112). A number has three (two) bits of mantissa, so
// all codes of at least 8 (E5M2: 4) are exact. Smaller codes are rounded half to even, with an error of at most half a
// code step. docs/quantization.md shows what that costs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"

namespace octavo {
namespace {

constexpr int LEAST_EXPONENT = -16;  // of numbers in either format
constexpr int EXPONENTS = 32;
constexpr int CODE_EXPONENT = 6;  // of the largest number's code
constexpr int BIAS = 127;         // of a unit's exponent

struct Float8Kind {
    int mantissa_bits, bias;
    uint8_t first_special;  // NaN or infinity, without the sign

    // The value of a magnitude below first_special.
    float value(int bits) const {
        const int exponent = bits >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
        if (exponent == 0) return std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
        return std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
    }
};

constexpr Float8Kind E4M3 = {3, 7, 0x7f}, E5M2 = {2, 15, 0x7c};

struct Float8Codes {
    Float8Kind kind;
    int8_t exponents[128];          // by magnitude: the exponent of its leading bit
    uint8_t codes[EXPONENTS][256];  // by number, for a unit with each exponent from LEAST_EXPONENT on

    explicit Float8Codes(const Float8Kind& of) : kind(of) {
        for (int bits = 0; bits < 128; ++bits) {
            const bool is_number = bits > 0 && bits < kind.first_special;
            exponents[bits] = static_cast<int8_t>(is_number ? std::ilogb(kind.value(bits)) : LEAST_EXPONENT);
        }
        for (int e = 0; e < EXPONENTS; ++e)
            for (int bits = 0; bits < 256; ++bits) codes[e][bits] = code(bits, e + LEAST_EXPONENT);
    }

  private:
    // Numbers too large for a unit with this exponent get an arbitrary code.
    uint8_t code(int bits, int exponent) const {
        const int magnitude = bits & 127;
        if (magnitude >= kind.first_special || exponents[magnitude] > exponent) return 0;
        const int rounded =
            static_cast<int>(std::nearbyint(std::ldexp(kind.value(magnitude), CODE_EXPONENT - exponent)));
        return static_cast<uint8_t>(bits & 128 ? -rounded : rounded);
    }
};

const Float8Codes& codes_of(FileBlock file) {
    static const Float8Codes e4m3(E4M3), e5m2(E5M2);
    return file == FileBlock::e4m3 ? e4m3 : e5m2;
}

uint8_t largest_magnitude(const uint8_t* values, int32_t count) {
    uint8_t most = 0;
    for (int32_t i = 0; i < count; ++i) most = std::max(most, static_cast<uint8_t>(values[i] & 127));
    return most;
}

// Packs one column of a unit.
void pack_column(const Float8Codes& table, const uint8_t* values, int column, uint8_t* unit) {
    const int exponent = table.exponents[largest_magnitude(values, UNIT_K)];
    const uint8_t* const codes = table.codes[exponent - LEAST_EXPONENT];
    for (int i = 0; i < UNIT_K; ++i) unit[i / 4 * QUAD_BYTES + 4 * column + i % 4] = codes[values[i]];
    unit[UNIT_K * PANEL_COLS + column] = static_cast<uint8_t>(exponent - CODE_EXPONENT + BIAS);
}

}  // namespace

void pack_float8_panel(const PackedWeight& w, const GroupArrays& source, int32_t panel, uint8_t* out) {
    const Float8Codes& table = codes_of(w.type->file);
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    const int32_t groups = num_groups(w.groups, w.k);
    if (columns < PANEL_COLS) std::memset(out, 0, static_cast<size_t>(w.panel_bytes));
    for (int32_t group = 0; group < groups; ++group) {
        const int32_t k0 = group * w.groups.k, count = std::min(w.groups.k, w.k - k0);
        uint8_t* const units = out + header_bytes(w.groups);
        for (int32_t c = 0; c < columns; ++c) {
            const uint8_t* const values = source.codes.data + static_cast<int64_t>(first + c) * w.k + k0;
            float scale;
            std::memcpy(&scale, source.scales.data + 4 * (static_cast<int64_t>(first + c) * groups + group), 4);
            // If any byte is NaN or infinity, the scale of its group becomes NaN, so that kernels need not check.
            if (largest_magnitude(values, count) >= table.kind.first_special) scale = __builtin_nanf("");
            std::memcpy(out + 4 * c, &scale, 4);
            for (int32_t unit = 0; unit < count / UNIT_K; ++unit)
                pack_column(table, values + unit * UNIT_K, c, units + unit * unit_bytes(w.type->traits));
        }
        out = units + static_cast<int64_t>(count / UNIT_K) * unit_bytes(w.type->traits);
    }
}

}  // namespace octavo
