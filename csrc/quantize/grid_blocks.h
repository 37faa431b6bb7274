// Blocks of 256 values whose codes are indices into a grid of vectors: the IQ2 and IQ3 types.
//
// For a scale s, the error of grid vector g for values x with weights w is, up to a constant, s * (s * B - 2 * A) with
// A = sum of w x g and B = sum of w g g. Neither depends on s, so one pass over the whole grid evaluates many scales,
// and later passes reuse A.
#pragma once

#include "../iq_grids.h"
#include "super_blocks.h"

namespace octavo {
namespace {

constexpr int SIGN_GROUP = 8;

// A type: `width` values share an index, `scaled` values share a scale of 4 bits. A value is
// block scale * step * (0.5 + scale) * grid value * sign. even: each eight values have an even number of minus signs.
struct IQ2XXS {
    static constexpr int width = 8, entries = 256, scaled = 32, bytes = 66;
    static constexpr bool even = true;
    static constexpr float step = 0.25f;
    static void vector(int i, int8_t* out) { std::memcpy(out, IQ2_XXS_GRID.values + 8 * i, 8); }
};
struct IQ2XS {
    static constexpr int width = 8, entries = 512, scaled = 16, bytes = 74;
    static constexpr bool even = true;
    static constexpr float step = 0.25f;
    static void vector(int i, int8_t* out) { std::memcpy(out, IQ2_XS_GRID.values + 8 * i, 8); }
};
struct IQ2S {
    static constexpr int width = 8, entries = 1024, scaled = 16, bytes = 82;
    static constexpr bool even = false;
    static constexpr float step = 0.25f;
    static void vector(int i, int8_t* out) { std::memcpy(out, IQ2_S_GRID.values + 8 * i, 8); }
};
struct IQ3XXS {
    static constexpr int width = 4, entries = 256, scaled = 32, bytes = 98;
    static constexpr bool even = true;
    static constexpr float step = 0.5f;
    static void vector(int i, int8_t* out) { std::memcpy(out, IQ3_XXS_GRID.values + 4 * i, 4); }
};
struct IQ3S {
    static constexpr int width = 4, entries = 512, scaled = 32, bytes = 110;
    static constexpr bool even = false;
    static constexpr float step = 2.0f;
    static void vector(int i, int8_t* out) {
        int8_t values[4];
        iq3_s_vector(i, values);
        std::memcpy(out, values, 4);
    }
};

// The grid by position within its vectors; the weighted squares of its vectors (B) for every index of 256 columns; and
// their products with the values (-2 * A) for one block at a time.
template <class T>
struct GridTables {
    static constexpr int vectors = SUPER / T::width;
    float grid[T::width][T::entries];
    float squares[vectors][T::entries];
    float products[vectors][T::entries];
    float largest;

    void fill_grid() {
        largest = 0;
        for (int entry = 0; entry < T::entries; ++entry) {
            int8_t values[8];
            T::vector(entry, values);
            for (int i = 0; i < T::width; ++i) {
                grid[i][entry] = values[i];
                largest = values[i] > largest ? values[i] : largest;
            }
        }
    }
    void fill_squares(const float* weights) {
        for (int v = 0; v < vectors; ++v)
            for (int e = 0; e < T::entries; e += LANES) {
                F32x16 sum = zero();
                for (int i = 0; i < T::width; ++i) {
                    const F32x16 g = load(grid[i] + e);
                    sum = fma(broadcast(weights[T::width * v + i]) * g, g, sum);
                }
                store(squares[v] + e, sum);
            }
    }
};

// 256 values without signs, times their weights, and the signs. A value is negative if its sign had to be changed.
struct Unsigned {
    float x[SUPER], wx[SUPER];
    uint8_t signs[SUPER / SIGN_GROUP];

    void take(const float* from, const float* weights, bool even) {
        for (int group = 0; group < SUPER / SIGN_GROUP; ++group) {
            int minus = 0, cheapest = 0;
            for (int i = 0; i < SIGN_GROUP; ++i) {
                const int at = SIGN_GROUP * group + i;
                const bool negative = from[at] < 0;
                x[at] = negative ? -from[at] : from[at];
                wx[at] = weights[at] * x[at];
                minus |= negative << i;
                if (wx[at] < wx[SIGN_GROUP * group + cheapest]) cheapest = i;
            }
            if (even && __builtin_parity(static_cast<unsigned>(minus))) {
                const int at = SIGN_GROUP * group + cheapest;
                x[at] = -x[at];
                wx[at] = -wx[at];
                minus ^= 1 << cheapest;
            }
            signs[group] = static_cast<uint8_t>(minus);
        }
    }
};

// The minimum of s * B - 2 * A over the grid for each of Count scales s, by lane. Keeps -2 * A.
template <class T, int Count>
void scan_grid(GridTables<T>& tables, const float* wx, int vector, const F32x16 (&scales)[Count],
               F32x16 (&least)[Count]) {
    F32x16 twice[T::width];
#pragma GCC unroll 16
    for (int i = 0; i < T::width; ++i) twice[i] = broadcast(-2 * wx[T::width * vector + i]);
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) least[k] = broadcast(3.4e38f);
    for (int e = 0; e < T::entries; e += LANES) {
        F32x16 a = twice[0] * load(tables.grid[0] + e);
#pragma GCC unroll 16
        for (int i = 1; i < T::width; ++i) a = fma(twice[i], load(tables.grid[i] + e), a);
        store(tables.products[vector] + e, a);
        const F32x16 b = load(tables.squares[vector] + e);
#pragma GCC unroll 16
        for (int k = 0; k < Count; ++k) least[k] = min(fma(scales[k], b, a), least[k]);
    }
}

struct GridPick {
    float score;
    int index;
};

// The same together with the indices, for a vector already processed by `scan_grid`.
template <class T, int Count>
void pick_from_grid(const GridTables<T>& tables, int vector, const float (&scales)[Count], GridPick (&picks)[Count]) {
    static constexpr float IOTA[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F32x16 least[Count], index[Count], s[Count];
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) {
        s[k] = broadcast(scales[k]);
        least[k] = broadcast(3.4e38f);
        index[k] = zero();
    }
    F32x16 number = load(IOTA);
    for (int e = 0; e < T::entries; e += LANES, number = number + broadcast(16.0f)) {
        const F32x16 a = load(tables.products[vector] + e), b = load(tables.squares[vector] + e);
#pragma GCC unroll 16
        for (int k = 0; k < Count; ++k) {
            const F32x16 score = fma(s[k], b, a);
            index[k] = select_greater(least[k], score, number, index[k]);
            least[k] = min(score, least[k]);
        }
    }
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) {
        alignas(64) float scores[LANES], numbers[LANES];
        store(scores, least[k]);
        store(numbers, index[k]);
        int best = 0;
        for (int lane = 1; lane < LANES; ++lane)
            if (scores[lane] < scores[best] || (scores[lane] == scores[best] && numbers[lane] < numbers[best]))
                best = lane;
        picks[k] = {scores[best], static_cast<int>(numbers[best])};
    }
}

inline float least_lane(F32x16 a) {
    alignas(64) float lanes[LANES];
    store(lanes, a);
    float least = lanes[0];
    for (int i = 1; i < LANES; ++i) least = lanes[i] < least ? lanes[i] : least;
    return least;
}

// Candidate positions of a scaled group's largest value, relative to the largest number in the grid.
constexpr float GRID_REACHES[] = {0.77f, 0.92f, 1.04f, 1.17f, 1.34f, 1.6f};
constexpr int NUM_REACHES = sizeof(GRID_REACHES) / sizeof(float);

template <class T>
struct GridCodes {
    static constexpr int vectors = SUPER / T::width, groups = SUPER / T::scaled;
    float block = 0, score = 3.4e38f;
    int scales[groups] = {};
    int indices[vectors] = {};
};

// Finds the best scale of each scaled group separately.
template <class T>
void search_grid_scales(GridTables<T>& tables, const Unsigned& u, float (&scales)[SUPER / T::scaled]) {
    constexpr int per_group = T::scaled / T::width;
    for (int group = 0; group < SUPER / T::scaled; ++group) {
        float far = 0;
        for (int i = 0; i < T::scaled; ++i) {
            const float x = u.x[T::scaled * group + i];
            far = x > far ? x : far;
        }
        F32x16 s[NUM_REACHES], least[NUM_REACHES];
        float scores[NUM_REACHES] = {};
        for (int k = 0; k < NUM_REACHES; ++k) s[k] = broadcast(far / (tables.largest * GRID_REACHES[k]));
        for (int v = 0; v < per_group; ++v) {
            scan_grid(tables, u.wx, per_group * group + v, s, least);
            for (int k = 0; k < NUM_REACHES; ++k) scores[k] += least_lane(least[k]);
        }
        float best = 3.4e38f;
        scales[group] = 0;
        for (int k = 0; k < NUM_REACHES; ++k) {
            const float scale = far / (tables.largest * GRID_REACHES[k]);
            if (scale * scores[k] < best) {
                best = scale * scores[k];
                scales[group] = scale;
            }
        }
    }
}

// Chooses group scales and indices for a given block scale. around: group scales whose Near nearest neighbours are
// tried.
template <int Near, class T>
void choose_grid_codes(const GridTables<T>& tables, const float (&around)[SUPER / T::scaled], GridCodes<T>& out) {
    constexpr int per_group = T::scaled / T::width, below = Near / 2, highest = 15 - below;
    out.score = 0;
    for (int group = 0; group < GridCodes<T>::groups; ++group) {
        const float unit = T::step * out.block, at = unit > 0 ? around[group] / unit - 0.5f : 0;
        const int first = (at > highest ? highest : at < below ? below : static_cast<int>(at + 0.5f)) - below;
        float s[Near], scores[Near] = {};
        for (int k = 0; k < Near; ++k) s[k] = unit * (static_cast<float>(first + k) + 0.5f);
        GridPick picks[per_group][Near];
        for (int v = 0; v < per_group; ++v) {
            pick_from_grid(tables, per_group * group + v, s, picks[v]);
            for (int k = 0; k < Near; ++k) scores[k] += s[k] * picks[v][k].score;
        }
        int best = 0;
        for (int k = 1; k < Near; ++k) best = scores[k] < scores[best] ? k : best;
        out.scales[group] = first + best;
        out.score += scores[best];
        for (int v = 0; v < per_group; ++v) out.indices[per_group * group + v] = picks[v][best].index;
    }
}

// The best block scale for these codes, rounded to float16, together with the group scales.
template <class T>
float refit_grid(const GridTables<T>& tables, const Unsigned& u, const float* weights, const GridCodes<T>& codes) {
    float xq = 0, qq = 0;
    for (int v = 0; v < GridCodes<T>::vectors; ++v) {
        const float scale = T::step * (static_cast<float>(codes.scales[v * T::width / T::scaled]) + 0.5f);
        for (int i = 0; i < T::width; ++i) {
            const float q = scale * tables.grid[i][codes.indices[v]];
            xq += u.wx[T::width * v + i] * q;
            qq += weights[T::width * v + i] * q * q;
        }
    }
    return qq > 0 && xq > 0 ? xq / qq : 0;
}

inline float as_half(float value) {
    alignas(64) float lanes[LANES];
    store(lanes, rounded_half(broadcast(value)));
    return lanes[0];
}

template <class T>
GridCodes<T> search_grid(GridTables<T>& tables, const Unsigned& u, const float* weights) {
    float scales[SUPER / T::scaled], largest = 0;
    search_grid_scales(tables, u, scales);
    for (const float scale : scales) largest = scale > largest ? scale : largest;
    GridCodes<T> best;
    if (!(largest > 0)) {
        best.score = 0;
        return best;
    }
    best.block = as_half(largest / (15.5f * T::step));
    choose_grid_codes<3>(tables, scales, best);
    // Repeat with the best block scale for these codes; the group scales keep their positions.
    GridCodes<T> again;
    again.block = as_half(refit_grid(tables, u, weights, best));
    for (int i = 0; i < GridCodes<T>::groups; ++i)
        scales[i] = again.block * T::step * (static_cast<float>(best.scales[i]) + 0.5f);
    choose_grid_codes<1>(tables, scales, again);
    return again.score < best.score ? again : best;
}

inline void put_word(uint8_t* out, const uint8_t* signs, int scale) {
    uint32_t word = static_cast<uint32_t>(scale) << 28;
    for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(signs[i] & 127) << (7 * i);
    std::memcpy(out, &word, 4);
}
inline void put_half_byte(uint8_t* out, int at, int value) {
    out[at / 2] |= static_cast<uint8_t>(value << (at % 2 * 4));
}

inline void write_grid(const GridCodes<IQ2XXS>& c, const Unsigned& u, uint8_t* out) {
    for (int i = 0; i < 32; ++i) out[2 + i / 4 * 8 + i % 4] = static_cast<uint8_t>(c.indices[i]);
    for (int i = 0; i < 8; ++i) put_word(out + 6 + 8 * i, u.signs + 4 * i, c.scales[i]);
}
inline void write_grid(const GridCodes<IQ2XS>& c, const Unsigned& u, uint8_t* out) {
    for (int i = 0; i < 32; ++i) {
        out[2 + 2 * i] = static_cast<uint8_t>(c.indices[i]);
        out[3 + 2 * i] = static_cast<uint8_t>(c.indices[i] >> 8 | (u.signs[i] & 127) << 1);
    }
    for (int i = 0; i < 16; ++i) put_half_byte(out + 66, i, c.scales[i]);
}
inline void write_grid(const GridCodes<IQ2S>& c, const Unsigned& u, uint8_t* out) {
    for (int i = 0; i < 32; ++i) {
        out[2 + i] = static_cast<uint8_t>(c.indices[i]);
        out[34 + i] = u.signs[i];
        out[66 + i / 4] |= static_cast<uint8_t>((c.indices[i] >> 8) << (i % 4 * 2));
    }
    for (int i = 0; i < 16; ++i) put_half_byte(out + 74, i, c.scales[i]);
}
inline void write_grid(const GridCodes<IQ3XXS>& c, const Unsigned& u, uint8_t* out) {
    for (int i = 0; i < 64; ++i) out[2 + i] = static_cast<uint8_t>(c.indices[i]);
    for (int i = 0; i < 8; ++i) put_word(out + 66 + 4 * i, u.signs + 4 * i, c.scales[i]);
}
inline void write_grid(const GridCodes<IQ3S>& c, const Unsigned& u, uint8_t* out) {
    for (int i = 0; i < 64; ++i) {
        out[2 + i] = static_cast<uint8_t>(c.indices[i]);
        out[66 + i / 8] |= static_cast<uint8_t>((c.indices[i] >> 8) << (i % 8));
    }
    for (int i = 0; i < 32; ++i) out[74 + i] = u.signs[i];
    for (int i = 0; i < 8; ++i) put_half_byte(out + 106, i, c.scales[i]);
}

template <class T>
void quantize_grid(const QuantizeRows& rows) {
    auto& tables = *static_cast<GridTables<T>*>(rows.scratch);
    tables.fill_grid();
    float ones[SUPER];
    for (float& one : ones) one = 1;
    if (!rows.importance) tables.fill_squares(ones);
    for (int64_t column = 0; column < rows.k; column += SUPER) {
        const float* const weights = rows.importance ? rows.importance + column : ones;
        if (rows.importance) tables.fill_squares(weights);
        for (int64_t row = 0; row < rows.rows; ++row) {
            uint8_t* const out = rows.out + (row * rows.k + column) / SUPER * T::bytes;
            Unsigned u;
            u.take(rows.x + row * rows.k + column, weights, T::even);
            const GridCodes<T> codes = search_grid(tables, u, weights);
            std::memset(out, 0, T::bytes);
            put_half(out, codes.block);
            write_grid(codes, u, out);
        }
    }
}

}  // namespace
}  // namespace octavo
