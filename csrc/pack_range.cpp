// How large the scales of a packed matrix are. By headers alone where these have the scales of units: a super-block
// then counts as if one of them were the largest there is, which quantizers see to.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pack.h"

namespace octavo {
namespace {

// Magnitudes as bits without a sign: their order is that of the numbers, and then of what is not finite.
struct Magnitude {
    uint32_t largest = 0;
    bool all_finite = true;

    // Takes in 16 numbers, uint16_t for float16 and uint32_t for float32.
    template <typename T>
    void add(const uint8_t* p) {
        constexpr uint32_t MAGNITUDE = (uint32_t{1} << (8 * sizeof(T) - 1)) - 1;
        constexpr uint32_t INFINITE = sizeof(T) == 2 ? 0x7c00 : 0x7f800000;
        T x[PANEL_COLS];
        std::memcpy(x, p, sizeof(x));
        uint32_t most = 0;
        for (const T bits : x) most = (bits & MAGNITUDE) > most ? bits & MAGNITUDE : most;
        if (most < INFINITE) {
            largest = most > largest ? most : largest;
            return;
        }
        all_finite = false;
        for (const T bits : x)
            if ((bits & MAGNITUDE) < INFINITE && (bits & MAGNITUDE) > largest) largest = bits & MAGNITUDE;
    }
};

uint32_t largest_byte(const uint8_t* p, uint32_t largest) {
    for (int i = 0; i < PANEL_COLS; ++i) largest = p[i] > largest ? p[i] : largest;
    return largest;
}

float from_f16(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 10), fraction = static_cast<int>(bits & 1023);
    return exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                    : std::ldexp(static_cast<float>(fraction), -24);
}
float from_e4m3(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 3), fraction = static_cast<int>(bits & 7);
    return exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                    : std::ldexp(static_cast<float>(fraction), -9);
}
float from_f32(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// What a scale of units or half units can be at most.
float largest_unit_scale(const PanelTraits& t) {
    switch (t.scales) {
        case Scales::u8_per_unit:  // of six bits
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
    float scale, min;
    bool all_finite;
};

Largest of_blocks(const PackedWeight& w) {
    const PanelTraits& t = w.type->traits;
    Magnitude scale, min;
    uint32_t exponent = 0;
    for (int32_t panel = 0; panel < num_panels(w); ++panel) {
        const uint8_t* header = w.data + panel * w.panel_bytes;
        for (int32_t k = 0; k < w.k; k += t.block_k, header += block_bytes(t)) {
            if (t.scales == Scales::e8m0)
                exponent = largest_byte(header, exponent);
            else
                scale.add<uint16_t>(header);
            if (t.mins != Mins::none) min.add<uint16_t>(header + min_at(t));
        }
    }
    const float e8m0 = std::ldexp(1.0f, static_cast<int>(exponent) - 128);
    const float factor = is_grid(t) ? 1.0f / w.type->table_factor : 1.0f;
    return {(t.scales == Scales::e8m0 ? e8m0 : from_f16(scale.largest)) * factor, from_f16(min.largest),
            scale.all_finite && min.all_finite};
}

Largest of_groups(const PackedWeight& w) {
    const PanelTraits& t = w.type->traits;
    const Groups& g = w.groups;
    const bool wide = g.scale_bytes == 4 || has_e4m3_scales(t) || has_exponents(t);
    const int unit_scales = unit_bytes(t) - code_bytes(t);  // bytes
    Magnitude scale, min;
    uint32_t unit_scale = 0;
    for (int32_t panel = 0; panel < num_panels(w); ++panel) {
        const uint8_t* at = w.data + panel * w.panel_bytes;
        for (int32_t k = 0; k < w.k; k += g.k) {
            wide ? scale.add<uint32_t>(at) : scale.add<uint16_t>(at);
            const uint8_t* const mins = at + PANEL_COLS * g.scale_bytes;
            if (g.min_bytes == 4) min.add<uint32_t>(mins);
            if (g.min_bytes == 2) min.add<uint16_t>(mins);
            at += header_bytes(g);
            for (int32_t u = k; u < k + g.k && u < w.k; u += UNIT_K, at += unit_bytes(t))
                for (int i = 0; i < unit_scales; i += PANEL_COLS)
                    unit_scale = largest_byte(at + code_bytes(t) + i, unit_scale);
        }
    }
    float largest = wide ? from_f32(scale.largest) : from_f16(scale.largest);
    if (has_exponents(t)) largest = std::ldexp(largest, static_cast<int>(unit_scale) - 127);
    if (has_e4m3_scales(t)) largest *= from_e4m3(unit_scale & 127);
    // Zero points reach as far as codes do; minimums of bytes are kept for codes that begin at -128.
    const float least = g.min_bytes == 1   ? 256 * largest
                        : g.min_bytes == 4 ? from_f32(min.largest)
                                           : from_f16(min.largest);
    return {largest, t.bits == 8 && g.min_bytes > 1 ? least + 128 * largest : least,
            scale.all_finite && min.all_finite};
}

uint8_t* range_at(const PackedWeight& w, uint8_t* data) { return data + packed_bytes(w) - RANGE_BYTES; }

}  // namespace

WeightRange find_range(const PackedWeight& w) {
    const PanelTraits& t = w.type->traits;
    if (is_dense(t)) return {};
    const Largest largest = is_grouped(t) ? of_groups(w) : of_blocks(w);
    const float scale = std::ldexp(largest.scale * largest_unit_scale(t), code_room(t));
    const float min = largest.min * largest_unit_min(t);
    const float most = std::min(std::max(scale, min), std::numeric_limits<float>::max());
    return {most > 0 ? std::ilogb(most) + 1 : 0, largest.all_finite ? 0 : 1};
}

void write_range(const PackedWeight& w, uint8_t* out) {
    const WeightRange range = find_range(w);
    std::memset(range_at(w, out), 0, RANGE_BYTES);
    std::memcpy(range_at(w, out), &range, sizeof(range));
}

void read_range(PackedWeight& w) { std::memcpy(&w.range, range_at(w, const_cast<uint8_t*>(w.data)), sizeof(w.range)); }

}  // namespace octavo
