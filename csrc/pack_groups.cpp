// Packs matrices whose codes, scales and minimums are given as arrays: grouped types (packed_weight.h).
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pack.h"

namespace octavo {
namespace {

constexpr uint64_t low_bits(int count) { return count == 64 ? ~0ull : (1ull << count) - 1; }

// Expands eight codes of Bits bits, in the low bits of a word, to one per byte by separating halves three times.
template <int Bits>
uint64_t spread_codes(uint64_t x) {
    constexpr uint64_t FOUR = low_bits(4 * Bits), TWO = low_bits(2 * Bits), ONE = low_bits(Bits);
    x = (x & FOUR) | (x >> (4 * Bits) & FOUR) << 32;
    x = (x & TWO * 0x100000001ull) | (x >> (2 * Bits) & TWO * 0x100000001ull) << 16;
    return (x & ONE * 0x1000100010001ull) | (x >> Bits & ONE * 0x1000100010001ull) << 8;
}

// Expands 32 codes to one per byte.
template <int Bits>
void spread_unit(const uint8_t* stored, uint8_t* codes) {
    for (int i = 0; i < UNIT_K; i += 8, stored += Bits) {
        uint64_t word = 0;
        std::memcpy(&word, stored, Bits);
        if (Bits < 8) word = spread_codes < Bits == 8 ? 1 : Bits > (word);
        std::memcpy(codes + i, &word, 8);
    }
}

void spread_unit(int bits, const uint8_t* stored, uint8_t* codes) {
    switch (bits) {
        case 2:
            return spread_unit<2>(stored, codes);
        case 3:
            return spread_unit<3>(stored, codes);
        case 4:
            return spread_unit<4>(stored, codes);
        case 5:
            return spread_unit<5>(stored, codes);
        case 6:
            return spread_unit<6>(stored, codes);
        case 7:
            return spread_unit<7>(stored, codes);
        default:
            return spread_unit<8>(stored, codes);
    }
}

// If a scale is NaN, the scale of its row becomes NaN, so that kernels need not check.
bool has_nan(const uint8_t* values, int32_t count) {
    return std::any_of(values, values + count, [](uint8_t value) { return (value & 127) == 127; });
}

// Writes the bytes of a column next to those of the other columns.
void write_column(uint8_t* out, int column, const uint8_t* value, int bytes) {
    std::memcpy(out + column * bytes, value, static_cast<size_t>(bytes));
}

// Writes the E4M3 scales of a unit after its codes. A NaN makes the scale of their row NaN (write_row_scale).
void write_unit_scales(const PackedWeight& w, const GroupArrays& source, int32_t first, int32_t unit, uint8_t* out) {
    std::memset(out, 0, 2 * PANEL_COLS);
    for (int32_t c = 0; c < std::min(PANEL_COLS, w.n - first); ++c)
        for (int half = 0; half < 2; ++half)
            out[PANEL_COLS * half + c] = source.mins.data[(first + c) * int64_t{w.k / 16} + 2 * unit + half];
}

void write_row_scale(const PackedWeight& w, const GroupArrays& source, int32_t row, int column, uint8_t* out) {
    const int32_t scales = w.k / 16;
    const float nan = __builtin_nanf("");
    if (has_nan(source.mins.data + int64_t{row} * scales, scales)) std::memcpy(out + 4 * column, &nan, 4);
}

void pack_panel(const PackedWeight& w, const GroupArrays& source, int32_t panel, uint8_t* out) {
    const PanelTraits& t = w.type->traits;
    const Groups& g = w.groups;
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first), groups = num_groups(g, w.k);
    const int64_t stored_unit = UNIT_K / 8 * source.bits, stored_row = w.k / UNIT_K * stored_unit;
    // Subtracted from codes that are stored as signed bytes, and from their zero points.
    const int middle = t.bits < 8 ? 0 : t.mins == Mins::none ? source.zero : 128;
    UnitCodes codes = {};
    for (int32_t group = 0; group < groups; ++group) {
        std::memset(out, 0, static_cast<size_t>(header_bytes(g)));
        for (int32_t c = 0; c < columns; ++c) {
            const int64_t at = static_cast<int64_t>(first + c) * groups + group;
            write_column(out, c, source.scales.data + at * g.scale_bytes, g.scale_bytes);
            if (has_e4m3_scales(t)) write_row_scale(w, source, first + c, c, out);
            uint8_t* const mins = out + PANEL_COLS * g.scale_bytes;
            if (g.min_bytes == 1)
                mins[c] = static_cast<uint8_t>(source.mins.data[at] - middle);
            else if (g.min_bytes > 1)
                write_column(mins, c, source.mins.data + at * g.min_bytes, g.min_bytes);
        }
        out += header_bytes(g);
        for (int32_t unit = group * (g.k / UNIT_K); unit < (group + 1) * (g.k / UNIT_K); ++unit) {
            for (int32_t c = 0; c < columns; ++c) {
                uint8_t column[UNIT_K];
                spread_unit(source.bits, source.codes.data + (first + c) * stored_row + unit * stored_unit, column);
                for (int i = 0; i < UNIT_K; ++i) column[i] = static_cast<uint8_t>(column[i] - middle);
                for (int q = 0; q < QUADS; ++q) std::memcpy(codes + q * QUAD_BYTES + 4 * c, column + 4 * q, 4);
            }
            write_unit(t.bits, codes, out);
            if (has_e4m3_scales(t)) write_unit_scales(w, source, first, unit, out + code_bytes(t));
            out += unit_bytes(t);
        }
    }
}

}  // namespace

void pack_groups(const PackedWeight& w, const GroupArrays& source, uint8_t* out) {
    const int32_t panels = num_panels(w);
    const auto pack = has_exponents(w.type->traits) ? pack_float8_panel : pack_panel;
    for (int32_t panel = 0; panel < panels; ++panel) pack(w, source, panel, out + panel * w.panel_bytes);
    if (w.num_orders > 0) std::memcpy(out + panels * w.panel_bytes, source.orders.data, source.orders.size);
}

void check_groups(const PackedWeight& w, const std::string& type_name, const GroupArrays& source) {
    const PanelTraits& t = w.type->traits;
    if (!is_grouped(t)) throw std::invalid_argument(type_name + " has no groups");
    const bool is_widened = !has_exponents(t) && t.bits == 8 && source.bits >= 5 && source.bits <= 8;
    const bool is_byte = t.bits < 8 || has_exponents(t) || t.mins != Mins::none ||
                         (source.zero >= (1 << source.bits) - 128 && source.zero <= 128);
    if ((source.bits != t.bits && !is_widened) || !is_byte)
        throw std::invalid_argument("codes of " + std::to_string(source.bits) + " bits with zero at " +
                                    std::to_string(source.zero) + " cannot be stored as " + type_name);
    const auto check = [&](const char* what, const ByteArray& array, size_t wanted) {
        if (array.size == wanted) return;
        throw std::invalid_argument(std::string(what) + " of " + type_name + " of " + std::to_string(w.n) + " x " +
                                    std::to_string(w.k) + " take " + std::to_string(wanted) + " bytes, not " +
                                    std::to_string(array.size));
    };
    const size_t groups = static_cast<size_t>(w.n) * num_groups(w.groups, w.k);
    check("codes", source.codes, static_cast<size_t>(w.n) * w.k * source.bits / 8);
    check("scales", source.scales, groups * w.groups.scale_bytes);
    const size_t unit_scales = has_e4m3_scales(t) ? static_cast<size_t>(w.n) * w.k / 16 : 0;
    check("minimums", source.mins, groups * w.groups.min_bytes + unit_scales);
    check("column orders", source.orders, order_bytes(w));
}

}  // namespace octavo
