// Packs matrices whose codes, scales and minimums come as arrays: grouped types (packed_weight.h).
#include <algorithm>
#include <cstring>

#include "pack.h"

namespace octavo {
namespace {

constexpr uint64_t low_bits(int count) { return count == 64 ? ~0ull : (1ull << count) - 1; }

// The eight codes of Bits bits in the low bits of a word, one a byte: halves are moved apart three times.
template <int Bits>
uint64_t spread_codes(uint64_t x) {
    constexpr uint64_t FOUR = low_bits(4 * Bits), TWO = low_bits(2 * Bits), ONE = low_bits(Bits);
    x = (x & FOUR) | (x >> (4 * Bits) & FOUR) << 32;
    x = (x & TWO * 0x100000001ull) | (x >> (2 * Bits) & TWO * 0x100000001ull) << 16;
    return (x & ONE * 0x1000100010001ull) | (x >> Bits & ONE * 0x1000100010001ull) << 8;
}

// 32 codes, one a byte.
template <int Bits>
void spread_unit(const uint8_t* stored, uint8_t* codes) {
    for (int i = 0; i < UNIT_K; i += 8, stored += Bits) {
        uint64_t word = 0;
        std::memcpy(&word, stored, Bits);
        if (Bits < 8) word = spread_codes<Bits == 8 ? 1 : Bits>(word);
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

// Bytes of a column side by side with those of the other columns.
void write_column(uint8_t* out, int column, const uint8_t* value, int bytes) {
    std::memcpy(out + column * bytes, value, static_cast<size_t>(bytes));
}

void pack_panel(const PackedWeight& w, const GroupArrays& source, int32_t panel, uint8_t* out) {
    const PanelTraits& t = w.type->traits;
    const Groups& g = w.groups;
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first), groups = w.k / g.k;
    const int64_t stored_unit = UNIT_K / 8 * source.bits, stored_row = w.k / UNIT_K * stored_unit;
    // Subtracted from codes that become signed bytes, and from their zero points.
    const int middle = t.bits < 8 ? 0 : t.mins == Mins::none ? source.zero : 128;
    UnitCodes codes = {};
    for (int32_t group = 0; group < groups; ++group) {
        std::memset(out, 0, static_cast<size_t>(header_bytes(g)));
        for (int32_t c = 0; c < columns; ++c) {
            const int64_t at = static_cast<int64_t>(first + c) * groups + group;
            write_column(out, c, source.scales + at * g.scale_bytes, g.scale_bytes);
            uint8_t* const mins = out + PANEL_COLS * g.scale_bytes;
            if (g.min_bytes == 1)
                mins[c] = static_cast<uint8_t>(source.mins[at] - middle);
            else if (g.min_bytes > 1)
                write_column(mins, c, source.mins + at * g.min_bytes, g.min_bytes);
        }
        out += header_bytes(g);
        for (int32_t unit = group * (g.k / UNIT_K); unit < (group + 1) * (g.k / UNIT_K); ++unit) {
            for (int32_t c = 0; c < columns; ++c) {
                uint8_t column[UNIT_K];
                spread_unit(source.bits, source.codes + (first + c) * stored_row + unit * stored_unit, column);
                for (int i = 0; i < UNIT_K; ++i) column[i] = static_cast<uint8_t>(column[i] - middle);
                for (int q = 0; q < QUADS; ++q) std::memcpy(codes + q * QUAD_BYTES + 4 * c, column + 4 * q, 4);
            }
            write_unit(t.bits, codes, out);
            out += unit_bytes(t);
        }
    }
}

}  // namespace

void pack_groups(const PackedWeight& w, const GroupArrays& source, uint8_t* out) {
    for (int32_t panel = 0; panel < num_panels(w); ++panel) pack_panel(w, source, panel, out + panel * w.panel_bytes);
}

}  // namespace octavo
