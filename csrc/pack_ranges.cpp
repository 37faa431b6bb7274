// Finds how large the scales of packed columns are. If headers have the scales of units, only headers are read: a
// super-block then counts as if one unit had the largest possible scale, as quantizers arrange.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pack.h"

namespace octavo {
namespace {

// Least and greatest range for which all results in kernels stay within the range of float.
constexpr int LEAST_RANGE = -100, GREATEST_RANGE = 60;

// The largest magnitudes of 16 columns, as bits without sign, whose order is that of the numbers.
struct Magnitudes {
    uint32_t largest[PANEL_COLS] = {};

    // T: uint16_t for float16, uint32_t for float32, int8_t for E4M3, uint8_t for unsigned values.
    template <typename T>
    void add(const uint8_t* p) {
        constexpr bool HAS_SIGN = sizeof(T) > 1 || std::numeric_limits<T>::is_signed;
        constexpr uint32_t MAGNITUDE = static_cast<uint32_t>((uint64_t{1} << (8 * sizeof(T) - HAS_SIGN)) - 1);
        T x[PANEL_COLS];
        std::memcpy(x, p, sizeof(x));
        for (int c = 0; c < PANEL_COLS; ++c) {
            const uint32_t bits = static_cast<uint32_t>(x[c]) & MAGNITUDE;
            largest[c] = bits > largest[c] ? bits : largest[c];
        }
    }
};

// Also converts NaN and infinity.
float from_f16(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 10), fraction = static_cast<int>(bits & 1023);
    if (exponent == 31) return std::numeric_limits<float>::infinity();
    return exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                    : std::ldexp(static_cast<float>(fraction), -24);
}
float from_f32(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
float from_e4m3(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 3), fraction = static_cast<int>(bits & 7);
    return exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                    : std::ldexp(static_cast<float>(fraction), -9);
}

// The largest possible scale of units or half units.
float largest_unit_scale(const PanelTraits& t) {
    switch (t.scales) {
        case Scales::u8_per_unit:  // six bits
            return 63;
        case Scales::i8_per_unit:
            return 32;
        case Scales::i8_per_half_unit:
            return 128;
        case Scales::u4_per_half_unit:
            return 15;
        case Scales::odd_u4_per_half_unit:
            return 31;
        default:
            return 1;
    }
}
float largest_unit_min(const PanelTraits& t) {
    return t.mins == Mins::u8_per_unit ? 63.0f : t.mins == Mins::u4_per_half_unit ? 15.0f : 1.0f;
}

struct Largest {
    float scale[PANEL_COLS], min[PANEL_COLS];
};

Largest of_blocks(const PackedWeight& w, const uint8_t* header) {
    const PanelTraits& t = w.type->traits;
    Magnitudes scale, min;
    for (int32_t k = 0; k < w.k; k += t.block_k, header += block_bytes(t)) {
        t.scales == Scales::e8m0 ? scale.add<uint8_t>(header) : scale.add<uint16_t>(header);
        if (t.mins != Mins::none) min.add<uint16_t>(header + min_at(t));
    }
    const float factor = is_grid(t) ? 1.0f / w.type->table_factor : 1.0f;
    Largest out;
    for (int c = 0; c < PANEL_COLS; ++c) {
        out.scale[c] = t.scales == Scales::e8m0 ? std::ldexp(1.0f, static_cast<int>(scale.largest[c]) - 128)
                                                : from_f16(scale.largest[c]) * factor;
        out.min[c] = from_f16(min.largest[c]);
    }
    return out;
}

Largest of_groups(const PackedWeight& w, const uint8_t* at) {
    const PanelTraits& t = w.type->traits;
    const Groups& g = w.groups;
    const bool wide = g.scale_bytes == 4 || has_e4m3_scales(t) || has_exponents(t);
    Magnitudes scale, min, zero, unit_scale;
    for (int32_t k = 0; k < w.k; k += g.k) {
        const uint8_t* const mins = at + PANEL_COLS * g.scale_bytes;
        wide ? scale.add<uint32_t>(at) : scale.add<uint16_t>(at);
        if (g.min_bytes == 4) min.add<uint32_t>(mins);
        if (g.min_bytes == 2) min.add<uint16_t>(mins);
        if (g.min_bytes == 1) zero.add<uint8_t>(mins);
        at += header_bytes(g);
        for (int32_t u = k; u < k + g.k && u < w.k; u += UNIT_K, at += unit_bytes(t))
            for (int i = code_bytes(t); i < unit_bytes(t); i += PANEL_COLS)
                has_e4m3_scales(t) ? unit_scale.add<int8_t>(at + i) : unit_scale.add<uint8_t>(at + i);
    }
    Largest out;
    for (int c = 0; c < PANEL_COLS; ++c) {
        float s = wide ? from_f32(scale.largest[c]) : from_f16(scale.largest[c]);
        if (has_exponents(t)) s = std::ldexp(s, static_cast<int>(unit_scale.largest[c]) - 127);
        if (has_e4m3_scales(t)) s *= from_e4m3(unit_scale.largest[c]);
        out.scale[c] = s;
        // Minimums for 8-bit codes are stored for codes that begin at -128.
        const float middle = t.bits == 8 && g.min_bytes > 0 ? 128 * s : 0.0f;
        const float least = g.min_bytes == 4 ? from_f32(min.largest[c]) : from_f16(min.largest[c]);
        out.min[c] = g.min_bytes == 1 && t.bits < 8 ? static_cast<float>(zero.largest[c]) * s : least + middle;
    }
    return out;
}

int range_of(float most) {
    if (!std::isfinite(most)) return RANGE_NOT_FINITE;
    return most > 0 ? std::clamp(std::ilogb(most) + 1, LEAST_RANGE, GREATEST_RANGE) : 0;
}

}  // namespace

void write_ranges(const PackedWeight& w, uint8_t* out, int32_t begin, int32_t end) {
    const PanelTraits& t = w.type->traits;
    if (is_dense(t)) return;
    int8_t* const ranges = reinterpret_cast<int8_t*>(out + ranges_at(w));
    for (int32_t panel = begin; panel < end; ++panel) {
        const uint8_t* const data = out + panel * w.panel_bytes;
        const Largest largest = is_grouped(t) ? of_groups(w, data) : of_blocks(w, data);
        for (int c = 0; c < PANEL_COLS; ++c) {
            const float scale = std::ldexp(largest.scale[c] * largest_unit_scale(t), code_room(t));
            const float min = largest.min[c] * largest_unit_min(t);
            const bool all_finite = std::isfinite(scale) && std::isfinite(min);
            ranges[panel * PANEL_COLS + c] =
                static_cast<int8_t>(all_finite ? range_of(scale > min ? scale : min) : RANGE_NOT_FINITE);
        }
    }
}

}  // namespace octavo
