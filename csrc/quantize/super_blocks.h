// Blocks of 256 values with integer scales: Q2_K to Q6_K and IQ4_XS.
//
// First, each group of values gets its best scale separately. These scales are then rounded to the integers of the
// type. Next, codes, group scales and the block scale are improved in turn, each with the other two fixed, and the
// state with the smallest error is kept.
#pragma once

#include "flat_blocks.h"

namespace octavo {
namespace {

constexpr int SUPER = 256;

// One number per block of a tile, in the lanes of its groups. Group: values per lane.
template <int Group>
struct Blocks {
    static constexpr int groups = SUPER / Group, count = LANES / groups;
    // Sums, or values of largest magnitude, over the groups of each block
    static F32x16 sum(F32x16 a) {
        return reduced(a, [](float x, float y) { return x + y; });
    }
    static F32x16 largest(F32x16 a) {
        return reduced(a, [](float x, float y) { return (y < 0 ? -y : y) > (x < 0 ? -x : x) ? y : x; });
    }
    template <class Combine>
    static F32x16 reduced(F32x16 a, Combine combine) {
        alignas(64) float lanes[LANES];
        store(lanes, a);
        for (int block = 0; block < count; ++block) {
            float* const own = lanes + block * groups;
            float total = own[0];
            for (int i = 1; i < groups; ++i) total = combine(total, own[i]);
            for (int i = 0; i < groups; ++i) own[i] = total;
        }
        return load(lanes);
    }
};

// x is near block * group * level. Every lane has its group's number and its block's number.
struct SuperScale {
    F32x16 block, group;
};

template <int Group, class Levels>
F32x16 error_of_scale(const Tile<Group>& tile, const Levels& levels, F32x16 scale) {
    const F32x16 to_levels = inverse(scale);
    F32x16 error = zero();
    for (int i = 0; i < Group; ++i) {
        const F32x16 rest = tile.x[i] - scale * levels.nearest(tile.x[i] * to_levels);
        error = fma(tile.w[i] * rest, rest, error);
    }
    return error;
}

// Chooses the best integers near `group` for a given block scale. Returns the error.
template <int Group, class Levels>
F32x16 choose_group(const Tile<Group>& tile, const Levels& levels, const Whole& range, SuperScale& s) {
    const F32x16 middle = s.group;
    F32x16 least = broadcast(3.4e38f);
    for (int step = -1; step <= 1; ++step) {
        const F32x16 group = clamp(middle + broadcast(static_cast<float>(step)), range.low, range.high);
        const F32x16 error = error_of_scale(tile, levels, s.block * group);
        s.group = select_greater(least, error, group, s.group);
        least = min(error, least);
    }
    return least;
}

// The best block scale for the codes of `s`.
template <int Group, class Levels>
F32x16 refit_block(const Tile<Group>& tile, const Levels& levels, const SuperScale& s) {
    const F32x16 to_levels = inverse(s.block * s.group);
    F32x16 xq = zero(), qq = zero();
    for (int i = 0; i < Group; ++i) {
        const F32x16 q = s.group * levels.nearest(tile.x[i] * to_levels);
        xq = fma(tile.wx[i], q, xq);
        qq = fma(tile.w[i] * q, q, qq);
    }
    return Blocks<Group>::sum(xq) * inverse(Blocks<Group>::sum(qq));
}

// scales: separately chosen for each group. starts: integers to try for the largest of them.
template <int Group, class Levels, int Count>
SuperScale search_super(const Tile<Group>& tile, const Levels& levels, const Whole& range, F32x16 scales,
                        const float (&starts)[Count]) {
    const F32x16 far = Blocks<Group>::largest(scales);
    SuperScale best = {zero(), zero()};
    F32x16 least = broadcast(3.4e38f);
    for (const float start : starts) {
        F32x16 block = rounded_half(far * broadcast(1 / start));
        for (int round = 0; round < 3; ++round) {
            SuperScale s = {block, clamp(round_even(scales * inverse(block)), range.low, range.high)};
            const F32x16 error = Blocks<Group>::sum(choose_group(tile, levels, range, s));
            best.block = select_greater(least, error, s.block, best.block);
            best.group = select_greater(least, error, s.group, best.group);
            least = min(error, least);
            block = rounded_half(refit_block(tile, levels, s));
        }
    }
    return best;
}

template <int Group, class Levels>
void code_super(const Tile<Group>& tile, const Levels& levels, const SuperScale& s, Codes<Group>& codes) {
    const F32x16 to_levels = inverse(s.block * s.group);
    for (int i = 0; i < Group; ++i) codes.set(i, levels.code(levels.nearest(tile.x[i] * to_levels)));
}

// The stored contents of a tile's block: one number for the block, one per group, and the codes of its values.
struct SuperCodes {
    float block, offset;
    int groups[16], offsets[16];
    uint8_t codes[SUPER];
};

template <int Group>
void take_block(int index, const F32x16& block, const F32x16& group, const Codes<Group>& codes, SuperCodes& out) {
    alignas(64) float blocks[LANES], groups[LANES];
    store(blocks, block);
    store(groups, group);
    const int first = index * Blocks<Group>::groups;
    out.block = blocks[first];
    for (int i = 0; i < Blocks<Group>::groups; ++i) {
        out.groups[i] = static_cast<int>(groups[first + i]);
        codes.of_lane(first + i, out.codes + Group * i);
    }
}

// Finds scales for tiles of groups. Every tile has whole blocks; the last one has the remaining blocks.
template <int Group, int Bytes, class Search, class Write>
void quantize_super(const QuantizeRows& rows, Search search, Write write) {
    for_each_tile<Group>(rows, [&](const Lanes& lanes, int64_t first, int count) {
        Tile<Group> tile;
        load_tile(lanes, tile);
        search(tile, [&](int index, const SuperCodes& codes) {
            if (index * Blocks<Group>::groups < count)
                write(codes, rows.out + (first / Blocks<Group>::groups + index) * Bytes);
        });
    });
}

constexpr float REACHES_3[] = {-4.0f, -3.0f, -3.25f, -3.5f, -3.75f, -4.25f, -4.5f,
                               3.0f,  2.2f,  2.5f,   2.75f, 3.25f,  3.5f,   4.0f};
constexpr float REACHES_6[] = {-32.0f, -31.0f, -31.5f, -32.4f, 31.0f, 31.5f};
constexpr float STARTS_3[] = {-32.0f, 31.0f, -29.0f}, STARTS_6[] = {-128.0f, -124.0f};

// Q3_K: eight levels; scales of 6 bits in three parts.
inline void write_q3_k(const SuperCodes& s, uint8_t* out) {
    std::memset(out, 0, 110);
    for (int i = 0; i < SUPER; ++i) out[i % 32] |= static_cast<uint8_t>((s.codes[i] >> 2) << (i / 32));
    put_pairs(s.codes, out + 32);
    for (int i = 0; i < 16; ++i) {
        const int scale = s.groups[i] + 32;
        out[96 + i % 8] |= static_cast<uint8_t>((scale & 15) << (i / 8 * 4));
        out[104 + i % 4] |= static_cast<uint8_t>((scale >> 4) << (i / 4 * 2));
    }
    put_half(out + 108, s.block);
}

// Q6_K: 64 levels; scales of 8 bits.
inline void write_q6_k(const SuperCodes& s, uint8_t* out) {
    std::memset(out, 0, 210);
    for (int i = 0; i < SUPER; ++i) {
        const int half = i / 128, rest = i % 128;
        out[64 * half + rest % 64] |= static_cast<uint8_t>((s.codes[i] & 15) << (rest / 64 * 4));
        out[128 + 32 * half + rest % 32] |= static_cast<uint8_t>((s.codes[i] >> 4) << (rest / 32 * 2));
    }
    for (int i = 0; i < 16; ++i) out[192 + i] = static_cast<uint8_t>(s.groups[i]);
    put_half(out + 208, s.block);
}

inline void put_nibbles(const uint8_t* codes, uint8_t* out) {
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>((codes[i] & 15) | codes[16 + i] << 4);
}

// IQ4_XS: the levels of `Curve`; scales of 6 bits in two parts.
inline void write_iq4_xs(const SuperCodes& s, uint8_t* out) {
    std::memset(out, 0, 136);
    put_half(out, s.block);
    for (int i = 0; i < 8; ++i) {
        const int scale = s.groups[i] + 32;
        out[2 + i / 4] |= static_cast<uint8_t>((scale >> 4) << (i % 4 * 2));
        out[4 + i / 2] |= static_cast<uint8_t>((scale & 15) << (i % 2 * 4));
        put_nibbles(s.codes + 32 * i, out + 8 + 16 * i);
    }
}

template <int Group, int Bytes, class Levels, int Reaches, int Starts>
void quantize_symmetric(const QuantizeRows& rows, const Levels& levels, const Whole& range,
                        const float (&reaches)[Reaches], const float (&starts)[Starts],
                        void (*write)(const SuperCodes&, uint8_t*)) {
    quantize_super<Group, Bytes>(
        rows,
        [&](const Tile<Group>& tile, auto put) {
            Codes<Group> codes;
            const F32x16 scales = search_scale(tile, levels, reaches, 2);
            const SuperScale s = search_super(tile, levels, range, scales, starts);
            code_super(tile, levels, s, codes);
            SuperCodes out;
            for (int i = 0; i < Blocks<Group>::count; ++i) {
                take_block(i, s.block, s.group, codes, out);
                put(i, out);
            }
        },
        write);
}

inline void quantize_q3_k(const QuantizeRows& rows) {
    quantize_symmetric<16, 110>(rows, Whole(-4, 3), Whole(-32, 31), REACHES_3, STARTS_3, write_q3_k);
}
inline void quantize_q6_k(const QuantizeRows& rows) {
    quantize_symmetric<16, 210>(rows, Whole(-32, 31), Whole(-128, 127), REACHES_6, STARTS_6, write_q6_k);
}
inline void quantize_iq4_xs(const QuantizeRows& rows) {
    quantize_symmetric<32, 136>(rows, Curve(), Whole(-32, 31), REACHES_CURVE, STARTS_3, write_iq4_xs);
}

// x is near block * group * level - offset_block * offset_group.
struct SuperLine {
    F32x16 block, group, offset_block, offset_group;
};

template <int Group>
F32x16 error_of_line(const Tile<Group>& tile, const Whole& levels, F32x16 scale, F32x16 offset) {
    const F32x16 to_levels = inverse(scale), shift = offset * to_levels;
    F32x16 error = zero();
    for (int i = 0; i < Group; ++i) {
        const F32x16 q = levels.nearest(fma(tile.x[i], to_levels, shift));
        const F32x16 rest = (tile.x[i] + offset) - scale * q;
        error = fma(tile.w[i] * rest, rest, error);
    }
    return error;
}

template <int Group>
F32x16 choose_line(const Tile<Group>& tile, const Whole& levels, const Whole& range, SuperLine& s) {
    const F32x16 group = s.group, offset = s.offset_group;
    F32x16 least = broadcast(3.4e38f);
    for (int i = -1; i <= 1; ++i)
        for (int j = -1; j <= 1; ++j) {
            const F32x16 g = clamp(group + broadcast(static_cast<float>(i)), range.low, range.high);
            const F32x16 o = clamp(offset + broadcast(static_cast<float>(j)), range.low, range.high);
            const F32x16 error = error_of_line(tile, levels, s.block * g, s.offset_block * o);
            s.group = select_greater(least, error, g, s.group);
            s.offset_group = select_greater(least, error, o, s.offset_group);
            least = min(error, least);
        }
    return least;
}

// Computes the best two block numbers for the codes of `s` by least squares; unchanged if they are linearly
// dependent.
template <int Group>
void refit_line(const Tile<Group>& tile, const Whole& levels, const SuperLine& s, F32x16& block, F32x16& offset_block) {
    const F32x16 to_levels = inverse(s.block * s.group);
    const F32x16 shift = s.offset_block * s.offset_group * to_levels;
    F32x16 sum_q = zero(), qq = zero(), xq = zero();
    for (int i = 0; i < Group; ++i) {
        const F32x16 q = levels.nearest(fma(tile.x[i], to_levels, shift)), wq = tile.w[i] * q;
        sum_q = sum_q + wq;
        qq = fma(wq, q, qq);
        xq = fma(tile.wx[i], q, xq);
    }
    using B = Blocks<Group>;
    const F32x16 g = s.group, o = s.offset_group;
    const F32x16 a = B::sum(g * g * qq), b = B::sum(g * o * sum_q), c = B::sum(o * o * tile.sum_w);
    const F32x16 x = B::sum(g * xq), y = B::sum(o * tile.sum_wx);
    const F32x16 det = a * c - b * b, safe = broadcast(1e-4f) * a * c, one = broadcast(1.0f);
    const F32x16 over = one / select_greater(det, safe, det, one);
    block = rounded_half(select_greater(det, safe, (c * x - b * y) * over, x * inverse(a)));
    offset_block = rounded_half(max(select_greater(det, safe, (b * x - a * y) * over, offset_block), zero()));
}

template <int Group, int Count>
SuperLine search_super_line(const Tile<Group>& tile, const Whole& levels, const Whole& range, const LineFit& fit,
                            const float (&stretches)[Count]) {
    using B = Blocks<Group>;
    const F32x16 top = range.high, minimum = zero() - fit.offset, scale = max(fit.scale, zero());
    SuperLine best = {zero(), zero(), zero(), zero()};
    F32x16 least = broadcast(3.4e38f);
    for (const float stretch : stretches) {
        F32x16 block = rounded_half(B::largest(scale) * broadcast(stretch) / top);
        F32x16 offset = rounded_half(B::largest(minimum) * broadcast(stretch) / top);
        for (int round = 0; round < 3; ++round) {
            SuperLine s = {block, clamp(round_even(scale * inverse(block)), range.low, top), offset,
                           clamp(round_even(minimum * inverse(offset)), range.low, top)};
            const F32x16 error = B::sum(choose_line(tile, levels, range, s));
            best.block = select_greater(least, error, s.block, best.block);
            best.group = select_greater(least, error, s.group, best.group);
            best.offset_block = select_greater(least, error, s.offset_block, best.offset_block);
            best.offset_group = select_greater(least, error, s.offset_group, best.offset_group);
            least = min(error, least);
            refit_line(tile, levels, s, block, offset);
        }
    }
    return best;
}

// Q4_K, Q5_K: six bits for each scale and minimum, in twelve bytes.
inline void put_scales_and_minimums(const SuperCodes& s, uint8_t* out) {
    put_half(out, s.block);
    put_half(out + 2, s.offset);
    uint8_t* const packed = out + 4;
    for (int i = 0; i < 4; ++i) {
        packed[i] = static_cast<uint8_t>(s.groups[i] | s.groups[4 + i] >> 4 << 6);
        packed[4 + i] = static_cast<uint8_t>(s.offsets[i] | s.offsets[4 + i] >> 4 << 6);
        packed[8 + i] = static_cast<uint8_t>((s.groups[4 + i] & 15) | (s.offsets[4 + i] & 15) << 4);
    }
}
inline void put_half_bytes(const uint8_t* codes, uint8_t* out) {
    for (int i = 0; i < 128; ++i) {
        const uint8_t* const c = codes + i / 32 * 64 + i % 32;
        out[i] = static_cast<uint8_t>((c[0] & 15) | (c[32] & 15) << 4);
    }
}
inline void write_q4_k(const SuperCodes& s, uint8_t* out) {
    put_scales_and_minimums(s, out);
    put_half_bytes(s.codes, out + 16);
}
inline void write_q5_k(const SuperCodes& s, uint8_t* out) {
    put_scales_and_minimums(s, out);
    std::memset(out + 16, 0, 32);
    for (int i = 0; i < SUPER; ++i) out[16 + i % 32] |= static_cast<uint8_t>((s.codes[i] >> 4) << (i / 32));
    put_half_bytes(s.codes, out + 48);
}
inline void write_q2_k(const SuperCodes& s, uint8_t* out) {
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(s.groups[i] | s.offsets[i] << 4);
    put_pairs(s.codes, out + 16);
    put_half(out + 80, s.block);
    put_half(out + 82, s.offset);
}

template <int Group, int Bytes, int Steps, int Stretches>
void quantize_affine(const QuantizeRows& rows, float top, float range, const float (&steps)[Steps],
                     const float (&stretches)[Stretches], void (*write)(const SuperCodes&, uint8_t*)) {
    const Whole levels(0, top), numbers(0, range);
    quantize_super<Group, Bytes>(
        rows,
        [&](const Tile<Group>& tile, auto put) {
            Codes<Group> codes;
            const LineFit fit = search_line(tile, top, steps, 3, true);
            const SuperLine s = search_super_line(tile, levels, numbers, fit, stretches);
            const F32x16 to_levels = inverse(s.block * s.group);
            const F32x16 shift = s.offset_block * s.offset_group * to_levels;
            for (int i = 0; i < Group; ++i) codes.set(i, levels.nearest(fma(tile.x[i], to_levels, shift)));
            SuperCodes out;
            for (int i = 0; i < Blocks<Group>::count; ++i) {
                take_block(i, s.offset_block, s.offset_group, codes, out);
                out.offset = out.block;
                std::memcpy(out.offsets, out.groups, sizeof out.groups);
                take_block(i, s.block, s.group, codes, out);
                put(i, out);
            }
        },
        write);
}

constexpr float STEPS_2[] = {0.0f, -0.9f, -0.7f, -0.5f, -0.35f, -0.2f, 0.2f, 0.35f, 0.5f, 0.7f, 0.9f, 1.2f, 1.6f};
constexpr float STEPS_K4[] = {0.0f, -1.0f, -0.7f, -0.4f, -0.2f, 0.2f, 0.4f, 0.7f, 1.0f, 1.4f, 1.8f, 2.3f, 3.0f};
constexpr float STEPS_K5[] = {0.0f, -0.7f, -0.35f, 0.35f, 0.7f, 1.0f, 1.4f, 2.0f};
constexpr float STRETCHES_2[] = {1.0f, 0.93f, 0.86f, 1.07f}, STRETCHES_K[] = {1.0f};

inline void quantize_q2_k(const QuantizeRows& rows) {
    quantize_affine<16, 84>(rows, 3, 15, STEPS_2, STRETCHES_2, write_q2_k);
}
inline void quantize_q4_k(const QuantizeRows& rows) {
    quantize_affine<32, 144>(rows, 15, 63, STEPS_K4, STRETCHES_K, write_q4_k);
}
inline void quantize_q5_k(const QuantizeRows& rows) {
    quantize_affine<32, 176>(rows, 31, 63, STEPS_K5, STRETCHES_K, write_q5_k);
}

}  // namespace
}  // namespace octavo
