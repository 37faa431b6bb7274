// Expands blocks of the GGUF types, as ggml defines them (ggml-common.h), to one code per byte.
#include <cstring>

#include "pack.h"

namespace octavo {
namespace {

// 32 codes: low nibbles first, then high nibbles.
void split_nibbles(const uint8_t* q, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = q[i] & 15;
        codes[i + 16] = q[i] >> 4;
    }
}

// Moves bit i of `bits` to bit 4 of code i, eight at a time: each byte keeps only its own bit.
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

void decode_iq3_s(const uint8_t* b, BlockCodes& out) {
    out.scale = read_u16(b);
    for (int i = 0; i < 64; ++i) {
        int8_t vector[4];
        iq3_s_vector(b[2 + i] | (b[66 + i / 8] >> (i % 8) & 1) << 8, vector);
        for (int j = 0; j < 4; ++j) {
            const bool minus = b[74 + i / 2] >> (4 * (i % 2) + j) & 1;
            out.codes[4 * i + j] = static_cast<uint8_t>((15 + (minus ? -vector[j] : vector[j])) / 2);
        }
    }
    for (int u = 0; u < 8; ++u) out.scales[u] = static_cast<uint8_t>(2 * (b[106 + u / 2] >> (4 * (u % 2)) & 15) + 1);
}

// A byte stores up to five base-3 digits as a fraction of 256. Multiplying the fraction by three yields its first digit
// as the integer part.
void split_trits(const uint8_t* bytes, int count, int digits, uint8_t* codes) {
    for (int i = 0; i < count; ++i) {
        uint8_t fraction = bytes[i];
        for (int j = 0; j < digits; ++j, fraction = static_cast<uint8_t>(fraction * 3))
            codes[count * j + i] = static_cast<uint8_t>(fraction * 3 >> 8);
    }
}

void decode_tq1_0(const uint8_t* b, BlockCodes& out) {
    split_trits(b, 32, 5, out.codes);
    split_trits(b + 32, 16, 5, out.codes + 160);
    split_trits(b + 48, 4, 4, out.codes + 240);
    out.scale = read_u16(b + 52);
}

void decode_tq2_0(const uint8_t* b, BlockCodes& out) {
    split_pairs(b, out.codes);
    out.scale = read_u16(b + 64);
}

// Q1_0 and Q2_0: consecutive codes in each byte.
void decode_few_bits(const uint8_t* b, int bits, int values, BlockCodes& out) {
    const int per_byte = 8 / bits;
    out.scale = read_u16(b);
    for (int i = 0; i < values; ++i)
        out.codes[i] = static_cast<uint8_t>(b[2 + i / per_byte] >> (bits * (i % per_byte)) & ((1 << bits) - 1));
}

// Four unsigned scales, for 16 values each. 127 would be NaN and is read as zero, as in ggml.
void decode_nvfp4(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 4; ++i) {
        out.scales[i] = b[i] == 127 ? 0 : b[i] & 127;
        for (int j = 0; j < 8; ++j) {
            out.codes[16 * i + j] = b[4 + 8 * i + j] & 15;
            out.codes[16 * i + 8 + j] = b[4 + 8 * i + j] >> 4;
        }
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
        case FileBlock::iq3_s:
            return decode_iq3_s(b, out);
        case FileBlock::tq1_0:
            return decode_tq1_0(b, out);
        case FileBlock::tq2_0:
            return decode_tq2_0(b, out);
        case FileBlock::q1_0:
        case FileBlock::q2_0:
            return decode_few_bits(b, type.traits.bits, type.file_values, out);
        case FileBlock::nvfp4:
            return decode_nvfp4(b, out);
        default:
            return decode_simple(type.traits, b, wants_codes, out);
    }
}

}  // namespace octavo
