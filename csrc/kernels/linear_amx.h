// Products of quantized panels with AMX, which have their own arithmetic: weights and activations are rounded to
// bfloat16 and multiplied by tiles, for any number of rows, so that a row's sums are the same in every batch.
//
// A unit of a panel becomes one tile: 16 pairs of k by 16 columns. With F = 2^-(range + 1) of its column, which keeps
// all numbers in the range of float16, a weight is
//     F w = fma(code * 2^-24, float16(F s 2^24), float16(F m)) in float16, then rounded to bfloat16
// The code is read as a subnormal float16, either unchanged or shifted left as far as a byte allows; m includes the
// zero point. Shifting the bits of a float16 right by three gives a bfloat16 whose exponent is 112 too small, which
// activations and finished sums compensate (linear_image_bf16.h, sum_factors). Numbers below 2^-14 become zero in the
// product, which is less than 2^-11 of the largest weights in the column.
//
// A tile product adds the products of even and of odd k separately, from zero, and adds both to the sum. All products
// of a row with a column form one chain of tile products in increasing k.
#pragma once

#include "amx_tiles.h"
#include "linear_codes_avx512.h"
#include "linear_image_bf16.h"

namespace octavo {
namespace {

constexpr int TILE_BYTES = 16 * 64;
// Rows whose activations stay in the L2 cache, and rows times panels whose sums a worker keeps there.
constexpr int BLOCK_ROWS = 512, KEPT_ROWS = 8192;
// Rows written for all panels of a run before the next rows, so that adjacent lines are written together.
constexpr int WRITTEN_ROWS = ROW_GROUP;
// With up to this many rows, two tiles, a panel is unpacked while it is multiplied; unpacking takes longer.
constexpr int PACKED_ROWS = 32;
constexpr int PIECE_UNITS = 16;  // units unpacked at once for more rows: two panels of them stay in the L1 cache
constexpr int AHEAD_UNITS = 2;   // units unpacked ahead of the multiplication, so that no load waits for stores
constexpr int RING_UNITS = 4;
constexpr int NEAR_BYTES = 1024;  // prefetch distance from the L2 to the L1 cache, ahead of the codes being unpacked
constexpr int64_t UNPACKED_BYTES = 2 * PIECE_UNITS * TILE_BYTES;

constexpr int64_t terms_bytes(int64_t) { return 0; }

// Sums are padded to whole tiles.
constexpr int32_t sum_rows(int32_t rows) { return (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; }

// 2^(range + exponent) of 16 columns.
inline F32x16 range_powers(const int8_t* ranges, int exponent) {
    const __m512i r = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ranges)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(r, _mm512_set1_epi32(127 + exponent)), 23))};
}
// 2^(exponent - range).
inline F32x16 inverse_range_powers(const int8_t* ranges, int exponent) {
    const __m512i r = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ranges)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127 + exponent), r), 23))};
}

inline bool scales_sums(const PackedWeight& w) { return w.ranges != nullptr; }
// If a column has a weight that is not finite, which the conversion to bfloat16 would hide, all its sums become NaN.
inline F32x16 sum_factors(const PackedWeight& w, int32_t panel) {
    if (!scales_sums(w)) return broadcast(1.0f);
    const int8_t* const ranges = w.ranges + static_cast<int64_t>(panel) * PANEL_COLS;
    const __mmask16 not_finite =
        _mm_cmpeq_epi8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ranges)), _mm_set1_epi8(RANGE_NOT_FINITE));
    const F32x16 powers = range_powers(ranges, 1 - UNPACKED_EXPONENT - ACTIVATION_EXPONENT);
    return {_mm512_mask_mov_ps(powers.v, not_finite, _mm512_set1_ps(__builtin_nanf("")))};
}

inline int panels_at_once() { return 2; }
inline int fitting_panels(int32_t rows, int) { return KEPT_ROWS / sum_rows(rows) / 2 * 2; }

// How far codes are shifted left in the low byte of a word.
template <typename F>
constexpr int code_shift() {
    return 8 - code_room(F::traits);
}
template <typename F>
constexpr bool has_direct_nibbles() {
    return F::bits == 4 && F::has_nibbles && !F::has_table;
}

// Whether a grid's values are between -16 and 15. Then the lowest five bits of the signed byte are kept, plus 16.
template <typename F>
constexpr bool has_short_values() {
    return F::is_grid && code_shift<F>() == 3;
}

// Words of 16 columns with the codes of k = 4q and 4q + 2, and with the codes of k = 4q + 1 and 4q + 3.
struct CodePairs {
    __m512i even, odd;
};

// Bits [first, first + 8) of each word as a word. If they extend past the word, adjacent words must have zeros there.
// The VBMI instruction leaves the shift port to the multiplications. Without VBMI, as when emulated, this is a shift.
template <int first>
inline __m512i byte_of_words(__m512i x) {
    if constexpr (first == 0) return _mm512_and_si512(x, _mm512_set1_epi16(0xff));
#if defined(__AVX512VBMI__)
    constexpr auto PLACE = [](int word) { return static_cast<int64_t>((16 * word + first) & 63) << (16 * word); };
    const __m512i places = _mm512_set1_epi64(PLACE(0) | PLACE(1) | PLACE(2) | PLACE(3));
    return _mm512_maskz_multishift_epi64_epi8(0x5555555555555555, places, x);
#else
    const __m512i shifted = first > 0 ? _mm512_srli_epi16(x, first) : _mm512_slli_epi16(x, -first);
    return _mm512_and_si512(shifted, _mm512_set1_epi16(0xff));
#endif
}

template <typename F, int Q>
inline CodePairs code_pairs(const PackedQuads<F>& source) {
    constexpr int S = code_shift<F>();
    __m512i u = source.template quad<Q>();
    if constexpr (has_short_values<F>()) {
        u = _mm512_slli_epi16(u, S);
        u = _mm512_xor_si512(_mm512_and_si512(u, _mm512_set1_epi8(-8)), _mm512_set1_epi8(-128));
        return {byte_of_words<0>(u), byte_of_words<8>(u)};
    } else {
        return {byte_of_words<-S>(u), byte_of_words<8 - S>(u)};
    }
}

// Moves the lower half of each even byte to its upper half and clears all other bits.
inline __m512i lower_nibbles(__m512i x) {
#if defined(__GFNI__)
    // One bit matrix for each byte, whose rows 4 to 7 select bits 0 to 3.
    return _mm512_maskz_gf2p8affine_epi64_epi8(0x5555555555555555, x, _mm512_set1_epi64(0x01020408), 0);
#else
    return _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(0xf0));
#endif
}
// Unpacks two quads of nibbles, Q and the next. The upper bytes of words are loaded from the following address as lower
// bytes, which is safe because at least the column ranges follow the codes of a matrix.
template <typename F, int Q>
inline void nibble_pairs(const PackedQuads<F>& source, CodePairs (&quads)[2]) {
    const uint8_t* const codes = source.codes() + 64 * (Q / 2);
    const __m512i x = load_bytes(codes), high = load_bytes(codes + 1), mask = _mm512_set1_epi16(0xf0);
    quads[0] = {lower_nibbles(x), lower_nibbles(high)};
    quads[1] = {_mm512_and_si512(x, mask), _mm512_and_si512(high, mask)};
}

inline __m512h as_halves(__m512i bits) { return (__m512h)bits; }

// Duplicates each of 16 words in place.
inline __m512i each_twice(__m256i words) {
    alignas(64) static constexpr uint16_t PLACES[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                        8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
    return _mm512_permutexvar_epi16(_mm512_load_si512(PLACES), _mm512_castsi256_si512(words));
}
inline __m512h to_halves(F32x16 x) { return as_halves(each_twice(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT))); }
// Converts 16 one-byte integers.
inline __m512h to_halves(const uint8_t* bytes) {
#if defined(__AVX512VBMI__)
    alignas(64) static constexpr uint8_t PLACES[64] = {
        0, 0, 0, 0, 1, 0, 1, 0, 2,  0, 2,  0, 3,  0, 3,  0, 4,  0, 4,  0, 5,  0, 5,  0, 6,  0, 6,  0, 7,  0, 7,  0,
        8, 0, 8, 0, 9, 0, 9, 0, 10, 0, 10, 0, 11, 0, 11, 0, 12, 0, 12, 0, 13, 0, 13, 0, 14, 0, 14, 0, 15, 0, 15, 0};
    const __m512i x = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm512_cvtepu16_ph(_mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_load_si512(PLACES), x));
#else
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm512_cvtepu16_ph(each_twice(words));
#endif
}
inline __m512h to_halves(const int8_t* bytes) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm512_cvtepi16_ph(each_twice(words));
}

// exponent - range for 16 columns, each duplicated.
inline __m512h range_exponents(const int8_t* ranges, int exponent) {
    const __m256i r = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(ranges)));
    return _mm512_cvtepi16_ph(each_twice(_mm256_sub_epi16(_mm256_set1_epi16(static_cast<short>(exponent)), r)));
}

// 16 float16 numbers times 2^exponents, each duplicated.
inline __m512h scaled_halves(const uint8_t* halves, __m512h exponents) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
    return _mm512_scalef_ph(as_halves(each_twice(x)), exponents);
}

// S = F s 2^(24 - shift) and M = F m for half a unit or a whole one.
struct WeightFactors {
    __m512h scale, min;
};

// The factors of the units of a panel, computed while walking over them.
template <typename F>
class UnitFactors {
  public:
    UnitFactors(const Panel& panel, const int8_t* ranges)
        : range_factor_(inverse_range_powers(ranges, -1)),
          code_factor_(inverse_range_powers(ranges, CODE_EXPONENT - 1)),
          range_exponent_(range_exponents(ranges, -1)),
          code_exponent_(range_exponents(ranges, CODE_EXPONENT - 1)) {
        const float zero = has_short_values<F>() ? 16.0f : F::is_wide ? 128.0f : static_cast<float>(panel.type.zero);
        zero_ = _mm512_set1_ph(static_cast<_Float16>(__builtin_ldexpf(-zero, -CODE_EXPONENT)));
    }

    // The factors of the current unit. half: which half, for units with two scales.
    WeightFactors of(const PackedQuads<F>& source, int half) {
        if constexpr (HAS_BYTES) {
            if (source.header != header_) read_header(source.header);
            const uint8_t* const bytes = source.header + byte_scales_at(F::traits);
            if constexpr (F::scales == Scales::u8_per_unit)
                return with_min(scale_ * to_halves(bytes + PANEL_COLS * source.unit), source, half);
            else
                return with_min(scale_ * to_halves(reinterpret_cast<const int8_t*>(source.half_scale_bytes(half))),
                                source, half);
        } else if constexpr (HAS_HALVES) {
            return with_min(scaled_halves(source.header, code_exponent_), source, half);
        } else {
            F32x16 s = source.scales();
            if constexpr (F::has_half_scales) s = s * source.half_scales(half);
            return with_min(to_halves(s * code_factor_), source, half);
        }
    }

  private:
    static constexpr int CODE_EXPONENT = 24 - code_shift<F>();
    // The header has float16 for many units, and each unit has its own byte scales and minimums.
    static constexpr bool HAS_BYTES = (F::scales == Scales::u8_per_unit || F::scales == Scales::i8_per_half_unit) &&
                                      (F::mins == 0 || F::has_byte_mins);
    // The header has float16 that are used as factors directly.
    static constexpr bool HAS_HALVES = F::scales == Scales::f16 && !F::is_grid && !F::has_half_mins;

    void read_header(const uint8_t* header) {
        header_ = header;
        scale_ = scaled_halves(header, code_exponent_);
        if constexpr (F::mins > 0)
            min_ = _mm512_setzero_ph() - scaled_halves(header + min_at(F::traits), range_exponent_);
    }
    WeightFactors with_min(__m512h scale, const PackedQuads<F>& source, int half) const {
        WeightFactors f = {scale, _mm512_setzero_ph()};
        if constexpr (HAS_BYTES && F::mins > 0)
            f.min = min_ * to_halves(source.header + byte_mins_at(F::traits) + PANEL_COLS * source.unit);
        else if constexpr (F::mins > 0 && HAS_HALVES)
            f.min = scaled_halves(source.header + min_at(F::traits), range_exponent_);
        else if constexpr (F::mins > 0)
            f.min = to_halves(source.mins(half) * range_factor_);
        if constexpr (F::is_wide || F::has_zero) f.min = F::mins > 0 ? f.min + scale * zero_ : scale * zero_;
        return f;
    }

    F32x16 range_factor_, code_factor_;       // F, F 2^CODE_EXPONENT
    __m512h range_exponent_, code_exponent_;  // the logarithms of these
    __m512h zero_;                            // -zero 2^-CODE_EXPONENT
    const uint8_t* header_ = nullptr;         // the header that the cached scale and minimum belong to
    __m512h scale_, min_;
};

// Unpacks units of a panel into tiles.
template <typename F>
struct TileUnpacker {
    PackedQuads<F> source;
    UnitFactors<F> factors;

    TileUnpacker(const Panel& panel, const int8_t* ranges, int first, int count)
        : source(panel, first, count), factors(panel, ranges) {}

    __attribute__((always_inline)) void unpack(uint8_t* tile) {
        const WeightFactors first = factors.of(source, 0);
        if constexpr (F::has_half_scales) {
            const WeightFactors second = factors.of(source, 1);
            unpack_quads<0, 4>(first, tile);
            unpack_quads<4, 4>(second, tile);
        } else {
            unpack_quads<0, QUADS>(first, tile);
        }
        source.next();
    }

  private:
    static __m512i weights(__m512i codes, const WeightFactors& f) {
        const __m512i w = (__m512i)_mm512_fmadd_ph(as_halves(codes), f.scale, f.min);
        // A rounding shift by three that keeps the sign; the mask then removes the copies of the sign.
        return _mm512_and_si512(_mm512_mulhrs_epi16(w, _mm512_set1_epi16(1 << 12)),
                                _mm512_set1_epi16(static_cast<short>(0x8fff)));
    }
    template <int First, int Count>
    __attribute__((always_inline)) void unpack_quads(const WeightFactors& f, uint8_t* tile) const {
        unroll<Count / 2>([&](auto i) __attribute__((always_inline)) {
            constexpr int Q = First + 2 * decltype(i)::value;
            CodePairs codes[2];
            if constexpr (has_direct_nibbles<F>()) {
                nibble_pairs<F, Q>(source, codes);
            } else {
                codes[0] = code_pairs<F, Q>(source);
                codes[1] = code_pairs<F, Q + 1>(source);
            }
            for (int j = 0; j < 2; ++j) {
                _mm512_storeu_si512(tile + 128 * (Q + j), weights(codes[j].even, f));
                _mm512_storeu_si512(tile + 128 * (Q + j) + 64, weights(codes[j].odd, f));
            }
        });
    }
};

// One or two groups of rows.
template <int G>
struct TileRows {
    ImageGroup groups[G];
    int first;  // first unit

    template <int g, int tile>
    void load(int u) const {
        tile_load<tile>(groups[g].unit(first + u), ROW_UNIT_BYTES);
    }
};
constexpr int GROUP_SUMS = ROW_GROUP * PANEL_COLS;

// Sums start from zero or from the sums of the units before.
template <int tile>
inline void begin_sums(const float* c, bool from_zero) {
    if (from_zero)
        tile_zero<tile>();
    else
        tile_load<tile>(c, 64);
}

// c [16 G][16]: sums of the rows with units [rows.first, rows.first + count) of a panel, whose tiles stay in tiles[u &
// mask]. The first unit starts from zero. ahead: prefetch distance in bytes.
template <typename F, int G>
__attribute__((noinline)) void multiply_unpacking(const Panel& panel, const int8_t* ranges, int count,
                                                  const TileRows<G>& given_rows, uint8_t* tiles, int mask,
                                                  int64_t ahead, float* c) {
    const TileRows<G> rows = given_rows;  // in registers: a load might wait for stores to the tiles
    TileUnpacker<F> unpacker(panel, ranges, rows.first, count);
    begin_sums<0>(c, rows.first == 0);
    if constexpr (G == 2) begin_sums<2>(c + GROUP_SUMS, rows.first == 0);
    for (int next = 0; next < count + AHEAD_UNITS; ++next) {
        if (next < count) {
            StreamedUnits<F>::template fetch_unit<2>(unpacker.source.codes() + ahead);
            StreamedUnits<F>::fetch_unit(unpacker.source.codes() + NEAR_BYTES);
            unpacker.unpack(tiles + (next & mask) * TILE_BYTES);
        }
        const int u = next - AHEAD_UNITS;
        if (u < 0) continue;
        tile_load<6>(tiles + (u & mask) * TILE_BYTES, 64);
        rows.template load<0, 4>(u);
        tile_dot_bf16<0, 4, 6>();
        tiles_unused<4>();
        if constexpr (G == 2) {
            rows.template load<1, 5>(u);
            tile_dot_bf16<2, 5, 6>();
            tiles_unused<5>();
        }
        tiles_unused<6>();
    }
    tile_store<0>(c, 64);
    if constexpr (G == 2) tile_store<2>(c + GROUP_SUMS, 64);
}

// The tiles of some units of P panels, PIECE_UNITS apart, and their sums.
template <int P>
struct TilePanels {
    const uint8_t* tiles;
    int count;
    float* sums[P];
};

// Calls f(accumulator number, address of its sums) for a group of rows with each panel.
template <int P, typename Do>
inline void each_sum(const TilePanels<P>& panels, int group, const Do& f) {
    unroll<P>([&](auto p) __attribute__((always_inline)) { f(p, panels.sums[p.value] + group * GROUP_SUMS); });
}

// Adds some units of the panels to the sums of groups [begin, end) of the image, from group `base` on. begin < end. One
// group at a time: two would need fewer loads, but more tiles than a processor has for each of two hardware threads
// (amx_tiles.h).
template <int P>
__attribute__((noinline)) void multiply_tiles(const TilePanels<P>& panels, const Image& image, int32_t base, int first,
                                              int begin, int end) {
    const bool from_zero = first == 0;
    each_sum<P>(panels, begin, [&](auto p, float* c) { begin_sums<p.value>(c, from_zero); });
    for (int g = begin; g < end; ++g) {
        const ImageGroup rows = image.group(base + g);
        for (int u = 0; u < panels.count; ++u) {
            const uint8_t* const tile = panels.tiles + u * TILE_BYTES;
            tile_load_once<4>(rows.unit(first + u), ROW_UNIT_BYTES);
            tile_load<6>(tile, 64);
            tile_dot_bf16<0, 4, 6>();
            tiles_unused<6>();
            if constexpr (P == 2) {
                tile_load<6>(tile + PIECE_UNITS * TILE_BYTES, 64);
                tile_dot_bf16<1, 4, 6>();
                tiles_unused<6>();
            }
            tiles_unused<4>();
        }
        // Load the next sums while these are stored, so that the products wait for neither.
        const int64_t next = g + 1 < end ? GROUP_SUMS : 0;
        each_sum<P>(panels, g, [&](auto p, float* c) {
            tile_store<p.value>(c, 64);
            begin_sums<p.value>(c + next, from_zero);
        });
    }
}

}  // namespace
}  // namespace octavo
