#include "pack.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

void write_nibbles(const UnitCodes& tile, uint8_t* out) {
    for (int c = 0; c < 4; ++c)
        for (int j = 0; j < 64; ++j)
            out[64 * c + j] = static_cast<uint8_t>((tile[128 * c + j] & 15) | tile[128 * c + 64 + j] << 4);
}

void write_pairs(const UnitCodes& tile, uint8_t* out) {
    for (int c = 0; c < 2; ++c)
        for (int j = 0; j < 64; ++j) {
            int byte = 0;
            for (int i = 0; i < 4; ++i) byte |= (tile[256 * c + 64 * i + j] & 3) << (2 * i);
            out[64 * c + j] = static_cast<uint8_t>(byte);
        }
}

void write_triples(const UnitCodes& tile, uint8_t* out) {
    for (int c = 0; c < 2; ++c)
        for (int i = 0; i < 3; ++i)
            for (int j = 0; j < 64; ++j)
                out[TRIPLE_BYTES * c + 64 * i + j] =
                    static_cast<uint8_t>(tile[256 * c + 64 * i + j] | tile[256 * c + 192 + j] >> (2 * i) << 6);
}

void write_bits(const UnitCodes& tile, int shift, uint8_t* out) {
    for (int j = 0; j < 64; ++j) {
        int byte = 0;
        for (int q = 0; q < 8; ++q) byte |= (tile[64 * q + j] >> shift & 1) << q;
        out[j] = static_cast<uint8_t>(byte);
    }
}

template <typename T>
uint8_t* write_column(uint8_t* out, int column, T value) {
    std::memcpy(out + column * sizeof(T), &value, sizeof(T));
    return out + PANEL_COLS * sizeof(T);
}

void write_header(const PanelTraits& t, const BlockCodes& block, int column, uint8_t* out) {
    if (t.scales == Scales::e8m0)
        out = write_column(out, column, static_cast<uint8_t>(block.scale));
    else
        out = write_column(out, column, block.scale);
    if (t.mins != Mins::none) out = write_column(out, column, block.min);
    for (int i = 0; i < byte_scales(t); ++i) out = write_column(out, column, block.scales[i]);
    for (int i = 0; i < byte_mins(t); ++i) out = write_column(out, column, block.mins[i]);
}

int file_header_bytes(const PackedWeight& w) {
    return is_grouped(w.type->traits) ? header_bytes(w.groups) : header_bytes(w.type->traits);
}

// Transposes the dwords of four columns, 16 bytes each, so that dword t of all four is contiguous in `out[t]`.
struct Dwords {
    uint32_t at[4][4];
};

Dwords transpose(const uint8_t* column, int64_t stride) {
    Dwords in, out;
    for (int c = 0; c < 4; ++c) std::memcpy(in.at[c], column + c * stride, 16);
#if defined(__SSE2__)  // every x86-64 has it; explicit because compilers do not vectorize the loop
    const auto load = [&](int c) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in.at[c])); };
    const __m128i a = _mm_unpacklo_epi32(load(0), load(1)), b = _mm_unpacklo_epi32(load(2), load(3));
    const __m128i c = _mm_unpackhi_epi32(load(0), load(1)), d = _mm_unpackhi_epi32(load(2), load(3));
    const __m128i rows[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b), _mm_unpacklo_epi64(c, d),
                             _mm_unpackhi_epi64(c, d)};
    std::memcpy(&out, rows, sizeof(out));
#else
    for (int t = 0; t < 4; ++t)
        for (int c = 0; c < 4; ++c) out.at[t][c] = in.at[c][t];
#endif
    return out;
}

// The position of the nibbles in a block of a file: pieces of 16 bytes, whose low and high nibbles are codes of the
// same unit (low ones first) or of two units.
struct NibblePlaces {
    int first;  // byte offset of the first piece in a block
    int pieces;
    bool pairs_of_units;
};

// Nibbles are at the end of every block whose codes are only nibbles.
NibblePlaces nibble_places(const WeightType& type) {
    const bool is_known =
        type.file == FileBlock::simple || type.file == FileBlock::q4_k || type.file == FileBlock::iq4_xs;
    if (type.traits.bits != 4 || !is_known) return {0, 0, false};
    return {type.file_bytes - type.traits.block_k / 2, units(type.traits), type.file == FileBlock::q4_k};
}

// Copies nibbles from the file to the units without expanding them to bytes: a dword with codes k to k + 3 and the next
// dword are combined into one, with the second in the high nibbles.
void pack_nibbles(const NibblePlaces& places, const uint8_t* blocks, int64_t row_bytes, uint8_t* out) {
    constexpr uint32_t LOW = 0x0f0f0f0f;
    for (int piece = 0; piece < places.pieces; ++piece) {
        // Two pieces of 16 bytes for two units, or one piece per unit, with its high nibbles in the second half.
        uint8_t* const low_out = out + (places.pairs_of_units ? piece / 2 * 512 + piece % 2 * 128 : piece * 256);
        uint8_t* const high_out = low_out + (places.pairs_of_units ? 256 : 128);
        for (int c = 0; c < PANEL_COLS; c += 4) {
            const Dwords in = transpose(blocks + c * row_bytes + places.first + 16 * piece, row_bytes);
            for (int half = 0; half < 2; ++half) {
                uint32_t low[4], high[4];
                for (int i = 0; i < 4; ++i) {
                    const uint32_t a = in.at[2 * half][i], b = in.at[2 * half + 1][i];
                    low[i] = (a & LOW) | (b & LOW) << 4;
                    high[i] = (a >> 4 & LOW) | (b & ~LOW);
                }
                std::memcpy(low_out + 64 * half + 4 * c, low, 16);
                std::memcpy(high_out + 64 * half + 4 * c, high, 16);
            }
        }
    }
}

// The codes of 16 columns, one per byte, in quads.
void spread_to_tiles(const BlockCodes (&blocks)[PANEL_COLS], int values, UnitCodes* tiles) {
    for (int i = 0; i < values / 16; ++i)
        for (int c = 0; c < PANEL_COLS; c += 4) {
            const Dwords quads = transpose(blocks[c].codes + 16 * i, sizeof(BlockCodes));
            for (int t = 0; t < 4; ++t) {
                const int quad = 4 * i + t;
                std::memcpy(&tiles[quad / QUADS][quad % QUADS * QUAD_BYTES + 4 * c], quads.at[t], 16);
            }
        }
}

// Writes the header for a block of a file. A type with scales in its units has one header per row, with the scale 1.
void write_headers(const PackedWeight& w, const BlockCodes (&blocks)[PANEL_COLS], int32_t columns, uint8_t* out) {
    const PanelTraits& t = w.type->traits;
    const float factor = 1.0f / w.type->table_factor;
    if (columns < PANEL_COLS) std::memset(out, 0, file_header_bytes(w));
    for (int32_t c = 0; c < columns; ++c)
        if (has_e4m3_scales(t))
            write_column(out, c, factor);
        else
            write_header(t, blocks[c], c, out);
}

void pack_quantized(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel) {
    const WeightType& type = *w.type;
    const PanelTraits& t = type.traits;
    const NibblePlaces places = nibble_places(type);
    const int32_t values = block_values(type), block_units = values / UNIT_K;
    const int64_t row_bytes = static_cast<int64_t>(w.k / values) * type.file_bytes;
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    BlockCodes blocks[PANEL_COLS] = {};
    UnitCodes tiles[8];
    for (int64_t b = 0; b < w.k / values; ++b) {
        const uint8_t* const begin = source + first * row_bytes + b * type.file_bytes;
        const bool direct = places.pieces > 0 && columns == PANEL_COLS;
        for (int32_t c = 0; c < columns; ++c) decode_block(type, begin + c * row_bytes, !direct, blocks[c]);
        if (b == 0 || !has_e4m3_scales(t)) {
            write_headers(w, blocks, columns, out);
            out += file_header_bytes(w);
        }
        if (direct) {
            pack_nibbles(places, begin, row_bytes, out);
            out += block_units * unit_bytes(t);
            continue;
        }
        spread_to_tiles(blocks, values, tiles);
        for (int u = 0; u < block_units; ++u, out += unit_bytes(t)) {
            write_unit(t.bits, tiles[u], out);
            for (int32_t c = 0; has_e4m3_scales(t) && c < PANEL_COLS; ++c)
                for (int half = 0; half < 2; ++half)
                    out[code_bytes(t) + PANEL_COLS * half + c] = blocks[c].scales[2 * u + half];
        }
    }
}

template <typename T>
void pack_dense(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel) {
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    if (columns < PANEL_COLS) std::memset(out, 0, static_cast<size_t>(w.panel_bytes));
    constexpr int32_t CHUNK = 64;  // values of k at a time, so that 16 short pieces of rows stay in the cache
    for (int32_t k0 = 0; k0 < w.k; k0 += CHUNK)
        for (int32_t c = 0; c < columns; ++c) {
            const uint8_t* const row = source + static_cast<int64_t>(first + c) * w.k * sizeof(T);
            for (int32_t k = k0; k < std::min(k0 + CHUNK, w.k); ++k)
                std::memcpy(out + (static_cast<int64_t>(k) * PANEL_COLS + c) * sizeof(T), row + k * sizeof(T),
                            sizeof(T));
        }
}

}  // namespace

void write_unit(int bits, const UnitCodes& codes, uint8_t* out) {
    switch (bits) {
        case 8:
            std::memcpy(out, codes, sizeof(UnitCodes));
            return;
        case 6:
            return write_triples(codes, out);
        case 5:
        case 4:
            write_nibbles(codes, out);
            break;
        case 3:
        case 2:
            write_pairs(codes, out);
            break;
        default:
            break;
    }
    if (bits % 2) write_bits(codes, bits - 1, out + QUAD_BYTES * (bits - 1));
}

void pack_panels(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t begin, int32_t end) {
    for (int32_t panel = begin; panel < end; ++panel) {
        uint8_t* const target = out + panel * w.panel_bytes;
        if (is_grid(w.type->traits))
            pack_grid_panel(w, source, target, panel);
        else if (!is_dense(w.type->traits))
            pack_quantized(w, source, target, panel);
        else if (w.type->traits.bits == 32)
            pack_dense<uint32_t>(w, source, target, panel);
        else
            pack_dense<uint16_t>(w, source, target, panel);
    }
}

}  // namespace octavo
