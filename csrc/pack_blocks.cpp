// The blocks of the GGUF types, as ggml defines them (ggml-common.h), spread out to one code a byte.
#include <cstring>

#include "pack.h"

namespace octavo {
namespace {

uint16_t read_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// 32 codes: low nibbles first, then high nibbles.
void split_nibbles(const uint8_t* q, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = q[i] & 15;
        codes[i + 16] = q[i] >> 4;
    }
}

// Bit i of `bits` becomes bit 4 of code i: eight at a time, each in the byte where only its own bit is left.
void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 4; ++i) {
        uint64_t own = bits[i] * 0x0101010101010101ull & 0x8040201008040201ull, word;
        own = (own + 0x7f7f7f7f7f7f7f7full) >> 3 & 0x1010101010101010ull;
        std::memcpy(&word, codes + 8 * i, 8);
        word |= own;
        std::memcpy(codes + 8 * i, &word, 8);
    }
}

// Eight scales and eight minimums of 6 bits in 12 bytes (Q4_K, Q5_K).
void unpack_6bit_scales(const uint8_t* s, uint8_t* scales, uint8_t* mins) {
    for (int i = 0; i < 4; ++i) {
        scales[i] = s[i] & 63;
        mins[i] = s[i + 4] & 63;
        scales[i + 4] = static_cast<uint8_t>((s[i + 8] & 15) | (s[i] >> 6 << 4));
        mins[i + 4] = static_cast<uint8_t>((s[i + 8] >> 4) | (s[i + 4] >> 6 << 4));
    }
}

void decode_simple(const PanelTraits& t, const uint8_t* b, bool wants_codes, BlockCodes& out) {
    const auto next_u16 = [&] {
        b += 2;
        return read_u16(b - 2);
    };
    out.scale = t.scales == Scales::e8m0 ? *b++ : next_u16();
    if (t.mins == Mins::f16) out.min = next_u16();
    if (t.bits == 8) {
        std::memcpy(out.codes, b, 32);
    } else if (t.bits == 5) {
        split_nibbles(b + 4, out.codes);
        add_fifth_bits(b, out.codes);
    } else if (wants_codes) {
        split_nibbles(b, out.codes);
    }
}

void decode_q4_k(const uint8_t* b, bool wants_codes, bool fifth_bit, BlockCodes& out) {
    out.scale = read_u16(b);
    out.min = read_u16(b + 2);
    unpack_6bit_scales(b + 4, out.scales, out.mins);
    if (!wants_codes) return;
    const uint8_t* const high = b + 16;
    const uint8_t* const q = b + (fifth_bit ? 48 : 16);
    for (int c = 0; c < 4; ++c)
        for (int i = 0; i < 32; ++i) {
            out.codes[64 * c + i] = q[32 * c + i] & 15;
            out.codes[64 * c + 32 + i] = q[32 * c + i] >> 4;
        }
    if (!fifth_bit) return;
    for (int u = 0; u < 8; ++u)
        for (int i = 0; i < 32; ++i) out.codes[32 * u + i] |= static_cast<uint8_t>((high[i] >> u & 1) << 4);
}

void decode_q6_k(const uint8_t* b, BlockCodes& out) {
    std::memcpy(out.scales, b + 192, 16);
    out.scale = read_u16(b + 208);
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
        uint8_t* const codes = out.codes + 128 * half;
        for (int i = 0; i < 32; ++i) {
            codes[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
            codes[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
            codes[i + 64] = static_cast<uint8_t>((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
            codes[i + 96] = static_cast<uint8_t>((low[i + 32] >> 4) | (high[i] >> 6) << 4);
        }
    }
}

// Two-bit codes of 256 values in 64 bytes (Q2_K, Q3_K).
void split_pairs(const uint8_t* q, uint8_t* codes) {
    for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 32; ++i) codes[128 * half + 32 * j + i] = q[32 * half + i] >> (2 * j) & 3;
}

void decode_q3_k(const uint8_t* b, BlockCodes& out) {
    split_pairs(b + 32, out.codes);
    for (int u = 0; u < 8; ++u)
        for (int i = 0; i < 32; ++i) out.codes[32 * u + i] |= static_cast<uint8_t>((b[i] >> u & 1) << 2);
    const uint8_t* const s = b + 96;
    for (int i = 0; i < 16; ++i) {
        const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
        const int high = s[8 + i % 4] >> (2 * (i / 4)) & 3;
        out.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    out.scale = read_u16(b + 108);
}

void decode_q2_k(const uint8_t* b, BlockCodes& out) {
    std::memcpy(out.scales, b, 16);
    split_pairs(b + 16, out.codes);
    out.scale = read_u16(b + 80);
    out.min = read_u16(b + 82);
}

void decode_iq4_xs(const uint8_t* b, bool wants_codes, BlockCodes& out) {
    out.scale = read_u16(b);
    const uint16_t high = read_u16(b + 2);
    for (int u = 0; u < 8; ++u) {
        const int low = b[4 + u / 2] >> (4 * (u % 2)) & 15;
        out.scales[u] = static_cast<uint8_t>((low | (high >> (2 * u) & 3) << 4) - 32);
        if (wants_codes) split_nibbles(b + 8 + 16 * u, out.codes + 32 * u);
    }
}

}  // namespace

void decode_block(const WeightType& type, const uint8_t* b, bool wants_codes, BlockCodes& out) {
    switch (type.file) {
        case FileBlock::q2_k:
            return decode_q2_k(b, out);
        case FileBlock::q3_k:
            return decode_q3_k(b, out);
        case FileBlock::q4_k:
            return decode_q4_k(b, wants_codes, type.traits.bits == 5, out);
        case FileBlock::q6_k:
            return decode_q6_k(b, out);
        case FileBlock::iq4_xs:
            return decode_iq4_xs(b, wants_codes, out);
        default:
            return decode_simple(type.traits, b, wants_codes, out);
    }
}

}  // namespace octavo
