#include "pack.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace octavo {
namespace {

constexpr const char* TYPE_NAMES[NUM_WEIGHT_TYPES] = {"F32",  "F16",    "BF16",   "Q4_0", "Q4_1", "Q5_0",
                                                      "Q5_1", "Q8_0",   "Q2_K",   "Q3_K", "Q4_K", "Q5_K",
                                                      "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"};

using Tile = uint8_t[QUADS * QUAD_BYTES];  // the codes of one unit, one a byte, in quads

void write_nibbles(const Tile tile, uint8_t* out) {
    for (int c = 0; c < 4; ++c)
        for (int j = 0; j < 64; ++j)
            out[64 * c + j] = static_cast<uint8_t>((tile[128 * c + j] & 15) | tile[128 * c + 64 + j] << 4);
}

void write_pairs(const Tile tile, uint8_t* out) {
    for (int c = 0; c < 2; ++c)
        for (int j = 0; j < 64; ++j) {
            int byte = 0;
            for (int i = 0; i < 4; ++i) byte |= (tile[256 * c + 64 * i + j] & 3) << (2 * i);
            out[64 * c + j] = static_cast<uint8_t>(byte);
        }
}

void write_triples(const Tile tile, uint8_t* out) {
    for (int c = 0; c < 2; ++c)
        for (int i = 0; i < 3; ++i)
            for (int j = 0; j < 64; ++j)
                out[TRIPLE_BYTES * c + 64 * i + j] =
                    static_cast<uint8_t>(tile[256 * c + 64 * i + j] | tile[256 * c + 192 + j] >> (2 * i) << 6);
}

void write_bits(const Tile tile, int shift, uint8_t* out) {
    for (int j = 0; j < 64; ++j) {
        int byte = 0;
        for (int q = 0; q < 8; ++q) byte |= (tile[64 * q + j] >> shift & 1) << q;
        out[j] = static_cast<uint8_t>(byte);
    }
}

void write_unit(WeightType type, const Tile tile, uint8_t* out) {
    switch (type) {
        case WeightType::Q8_0:
            std::memcpy(out, tile, sizeof(Tile));
            return;
        case WeightType::Q2_K:
            return write_pairs(tile, out);
        case WeightType::Q3_K:
            write_pairs(tile, out);
            return write_bits(tile, 2, out + 128);
        case WeightType::Q6_K:
            return write_triples(tile, out);
        default:
            write_nibbles(tile, out);
    }
    if (type == WeightType::Q5_0 || type == WeightType::Q5_1 || type == WeightType::Q5_K)
        write_bits(tile, 4, out + 256);
}

template <typename T>
uint8_t* write_column(uint8_t* out, int column, T value) {
    std::memcpy(out + column * sizeof(T), &value, sizeof(T));
    return out + PANEL_COLS * sizeof(T);
}

void write_header(WeightType type, const BlockCodes& block, int column, uint8_t* out) {
    if (type == WeightType::MXFP4) {
        write_column(out, column, static_cast<uint8_t>(block.d));
        return;
    }
    out = write_column(out, column, block.d);
    const bool k_mins = type == WeightType::Q4_K || type == WeightType::Q5_K;
    if (k_mins || type == WeightType::Q4_1 || type == WeightType::Q5_1 || type == WeightType::Q2_K)
        out = write_column(out, column, block.m);
    int scales = 0;
    if (type == WeightType::Q2_K || type == WeightType::Q3_K || type == WeightType::Q6_K) scales = 16;
    if (k_mins || type == WeightType::IQ4_XS) scales = 8;
    for (int i = 0; i < scales; ++i) out = write_column(out, column, block.scales[i]);
    for (int i = 0; k_mins && i < 8; ++i) out = write_column(out, column, block.mins[i]);
}

// The dwords of four columns, 16 bytes of each, so that dword t of all four lies together in `out[t]`.
struct Dwords {
    uint32_t at[4][4];
};

Dwords transpose(const uint8_t* column, int64_t stride) {
    Dwords in, out;
    for (int c = 0; c < 4; ++c) std::memcpy(in.at[c], column + c * stride, 16);
#if defined(__SSE2__)  // every x86-64 has it; written out because compilers do not find it
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

// Where a type keeps its nibbles: pieces of 16 bytes, whose low and high nibbles are codes of the same unit (the low
// ones before the high ones) or, in Q4_K, of two units.
struct NibblePlaces {
    int first;  // byte of the first piece in a block
    int pieces;
    bool pairs_of_units;
};

NibblePlaces nibble_places(WeightType type) {
    switch (type) {
        case WeightType::Q4_0:
        case WeightType::IQ4_NL:
            return {2, 1, false};
        case WeightType::Q4_1:
            return {4, 1, false};
        case WeightType::MXFP4:
            return {1, 1, false};
        case WeightType::IQ4_XS:
            return {8, 8, false};
        case WeightType::Q4_K:
            return {16, 8, true};
        default:
            return {0, 0, false};
    }
}

// Nibbles go from the file to the units without being spread out to bytes: a dword of codes k to k + 3 and the next
// one become one dword, the second in the high nibbles.
void pack_nibbles(const NibblePlaces& places, const uint8_t* blocks, int64_t row_bytes, uint8_t* out) {
    constexpr uint32_t LOW = 0x0f0f0f0f;
    for (int piece = 0; piece < places.pieces; ++piece) {
        // Q4_K: two pieces of 16 bytes for two units. Else one piece a unit, its high nibbles in the second half.
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

void pack_quantized(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel) {
    const PanelLayout layout = panel_layout(w.type);
    const NibblePlaces places = nibble_places(w.type);
    const int64_t row_bytes = static_cast<int64_t>(w.k / layout.block_k) * layout.file_bytes;
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    BlockCodes blocks[PANEL_COLS] = {};
    Tile tiles[8];
    for (int64_t b = 0; b < w.k / layout.block_k; ++b) {
        const uint8_t* const begin = source + first * row_bytes + b * layout.file_bytes;
        const bool direct = places.pieces > 0 && columns == PANEL_COLS;
        if (columns < PANEL_COLS) std::memset(out, 0, layout.header_bytes);
        for (int32_t c = 0; c < columns; ++c) {
            decode_block(w.type, begin + c * row_bytes, !direct, blocks[c]);
            write_header(w.type, blocks[c], c, out);
        }
        out += layout.header_bytes;
        if (direct) {
            pack_nibbles(places, begin, row_bytes, out);
            out += static_cast<int64_t>(layout.units()) * layout.unit_bytes;
            continue;
        }
        for (int i = 0; i < layout.block_k / 16; ++i)
            for (int c = 0; c < PANEL_COLS; c += 4) {
                const Dwords quads = transpose(blocks[c].codes + 16 * i, sizeof(BlockCodes));
                for (int t = 0; t < 4; ++t) {
                    const int quad = 4 * i + t;
                    std::memcpy(&tiles[quad / QUADS][quad % QUADS * QUAD_BYTES + 4 * c], quads.at[t], 16);
                }
            }
        for (int u = 0; u < layout.units(); ++u, out += layout.unit_bytes) write_unit(w.type, tiles[u], out);
    }
}

template <typename T>
void pack_dense(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t panel) {
    const int32_t first = panel * PANEL_COLS, columns = std::min(PANEL_COLS, w.n - first);
    if (columns < PANEL_COLS) std::memset(out, 0, static_cast<size_t>(w.panel_bytes));
    constexpr int32_t CHUNK = 64;  // values of k at a time: 16 short pieces of rows stay in the cache
    for (int32_t k0 = 0; k0 < w.k; k0 += CHUNK)
        for (int32_t c = 0; c < columns; ++c) {
            const uint8_t* const row = source + static_cast<int64_t>(first + c) * w.k * sizeof(T);
            for (int32_t k = k0; k < std::min(k0 + CHUNK, w.k); ++k)
                std::memcpy(out + (static_cast<int64_t>(k) * PANEL_COLS + c) * sizeof(T), row + k * sizeof(T),
                            sizeof(T));
        }
}

}  // namespace

const char* weight_type_name(WeightType type) { return TYPE_NAMES[static_cast<int>(type)]; }

WeightType parse_weight_type(const std::string& name) {
    std::string known;
    for (int i = 0; i < NUM_WEIGHT_TYPES; ++i) {
        if (name == TYPE_NAMES[i]) return static_cast<WeightType>(i);
        known += (i ? ", " : "") + std::string(TYPE_NAMES[i]);
    }
    throw std::invalid_argument("weight type '" + name + "' cannot be packed; known: " + known);
}

void pack_panels(const PackedWeight& w, const uint8_t* source, uint8_t* out, int32_t begin, int32_t end) {
    for (int32_t panel = begin; panel < end; ++panel) {
        uint8_t* const target = out + panel * w.panel_bytes;
        if (w.type == WeightType::F32)
            pack_dense<uint32_t>(w, source, target, panel);
        else if (is_dense(w.type))
            pack_dense<uint16_t>(w, source, target, panel);
        else
            pack_quantized(w, source, target, panel);
    }
}

}  // namespace octavo
