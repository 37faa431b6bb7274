// Packs types whose codes are indices into grids into panels (packed_weight.h). ggml-common.h defines their blocks.
#include <algorithm>
#include <cstring>

#include "pack.h"

namespace octavo {
namespace {

constexpr int PAIRS = QUADS / 2;
constexpr int UNITS = 8;

uint32_t read_u32(const uint8_t* p) { return read_u16(p) | static_cast<uint32_t>(read_u16(p + 2)) << 16; }

// A block of one column. Eight values share one index, or have one in each of its bytes.
struct GridBlock {
    uint16_t scale = 0;
    uint8_t scales[UNITS] = {};
    uint16_t index[UNITS * PAIRS] = {};
    uint8_t signs[UNITS * PAIRS] = {};
};

// Expands seven stored bits to eight signs: the eighth makes the number of minus signs even.
uint8_t even_signs(uint32_t stored) {
    stored &= 127;
    return static_cast<uint8_t>(stored | static_cast<uint32_t>(__builtin_parity(stored)) << 7);
}

// Reads the signs of a unit, and its scale for both halves, from a word.
void read_signs_and_scale(uint32_t word, int unit, GridBlock& out) {
    for (int p = 0; p < PAIRS; ++p) out.signs[PAIRS * unit + p] = even_signs(word >> (7 * p));
    out.scales[unit] = static_cast<uint8_t>((word >> 28) * 17);
}

void read_iq1_s(const uint8_t* b, GridBlock& out) {
    for (int unit = 0; unit < UNITS; ++unit) {
        const int header = read_u16(b + 34 + 2 * unit), minus = header >> 15;
        for (int p = 0; p < PAIRS; ++p) {
            const int high = (header >> (3 * p) & 7) | minus << 3;
            out.index[PAIRS * unit + p] = static_cast<uint16_t>(b[2 + PAIRS * unit + p] | high << 8);
        }
        out.scales[unit] = static_cast<uint8_t>((header >> 12 & 7) * 17);
    }
}

void read_iq1_m(const uint8_t* b, GridBlock& out) {
    out.scale = 0;
    for (int word = 0; word < 4; ++word) {
        const int bits = read_u16(b + 48 + 2 * word);
        out.scale = static_cast<uint16_t>(out.scale | bits >> 12 << (4 * word));
        for (int i = 0; i < 2; ++i) {
            const int low = bits >> (6 * i) & 7, high = bits >> (6 * i + 3) & 7;
            out.scales[2 * word + i] = static_cast<uint8_t>(low | high << 4);
        }
    }
    for (int i = 0; i < UNITS * PAIRS; ++i)
        out.index[i] = static_cast<uint16_t>(b[i] | (b[32 + i / 2] >> (4 * (i % 2)) & 15) << 8);
}

void read_iq2_xxs(const uint8_t* b, GridBlock& out) {
    for (int unit = 0; unit < UNITS; ++unit, b += 8) {
        for (int p = 0; p < PAIRS; ++p) out.index[PAIRS * unit + p] = b[2 + p];
        read_signs_and_scale(read_u32(b + 6), unit, out);
    }
}

void read_iq2_xs(const uint8_t* b, GridBlock& out) {
    for (int i = 0; i < UNITS * PAIRS; ++i) {
        const uint16_t word = read_u16(b + 2 + 2 * i);
        out.index[i] = word & 511;
        out.signs[i] = even_signs(word >> 9);
    }
    std::memcpy(out.scales, b + 66, UNITS);
}

void read_iq2_s(const uint8_t* b, GridBlock& out) {
    for (int i = 0; i < UNITS * PAIRS; ++i)
        out.index[i] = static_cast<uint16_t>(b[2 + i] | (b[66 + i / 4] >> (2 * (i % 4)) & 3) << 8);
    std::memcpy(out.signs, b + 34, UNITS * PAIRS);
    std::memcpy(out.scales, b + 74, UNITS);
}

void read_iq3_xxs(const uint8_t* b, GridBlock& out) {
    for (int i = 0; i < UNITS * PAIRS; ++i) out.index[i] = read_u16(b + 2 + 2 * i);
    for (int unit = 0; unit < UNITS; ++unit) read_signs_and_scale(read_u32(b + 66 + 4 * unit), unit, out);
}

void read_block(FileBlock file, const uint8_t* b, GridBlock& out) {
    out.scale = read_u16(b);
    switch (file) {
        case FileBlock::iq1_s:
            return read_iq1_s(b, out);
        case FileBlock::iq1_m:
            return read_iq1_m(b, out);
        case FileBlock::iq2_xxs:
            return read_iq2_xxs(b, out);
        case FileBlock::iq2_xs:
            return read_iq2_xs(b, out);
        case FileBlock::iq2_s:
            return read_iq2_s(b, out);
        default:
            return read_iq3_xxs(b, out);
    }
}

// Adds one column to the planes of a unit, which must start as zeros.
void write_unit_column(int bits, const uint16_t* index, const uint8_t* signs, int column, uint8_t* out) {
    uint8_t* const rest = out + PANEL_COLS * PAIRS;
    for (int p = 0; p < PAIRS; ++p) {
        const int high = index[p] >> 8;
        out[PANEL_COLS * p + column] = static_cast<uint8_t>(index[p]);
        if (bits == 3) rest[PANEL_COLS * p + column] = static_cast<uint8_t>(high);
        if (bits == 2) rest[column] |= static_cast<uint8_t>(high << (2 * p));
        if (bits == 1) rest[PANEL_COLS * (p / 2) + column] |= static_cast<uint8_t>(high << (4 * (p % 2)));
        if (bits == 1) continue;
        uint8_t* const quads = rest + (bits == 2 ? PANEL_COLS : PANEL_COLS * PAIRS) + 2 * QUADS * p + column / 2;
        quads[0] |= static_cast<uint8_t>((signs[p] & 15) << (4 * (column % 2)));
        quads[QUADS] |= static_cast<uint8_t>((signs[p] >> 4) << (4 * (column % 2)));
    }
}

}  // namespace

void pack_grid_panel(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel) {
    const WeightType& type = *w.type;
    const PanelTraits& t = type.traits;
    const int64_t blocks = w.k / t.block_k, row_bytes = blocks * type.file_bytes;
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    std::memset(out, 0, static_cast<size_t>(w.panel_bytes));
    for (int64_t b = 0; b < blocks; ++b, out += block_bytes(t))
        for (int32_t c = 0; c < columns; ++c) {
            GridBlock block;
            read_block(type.file, source + (first + c) * row_bytes + b * type.file_bytes, block);
            std::memcpy(out + 2 * c, &block.scale, 2);
            for (int u = 0; u < UNITS; ++u) {
                out[byte_scales_at(t) + PANEL_COLS * u + c] = block.scales[u];
                write_unit_column(t.bits, block.index + PAIRS * u, block.signs + PAIRS * u, c,
                                  out + header_bytes(t) + u * unit_bytes(t));
            }
        }
}

}  // namespace octavo
