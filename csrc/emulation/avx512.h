// AVX-512, VNNI and AMX intrinsics for an AVX2 machine: SIMDe, replacements for what it lacks or rounds differently,
// and tiles in plain C++. Included in the wide kernels by the CMake option OCTAVO_EMULATE_AVX512, which is only for
// tests.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

namespace octavo {
namespace {
namespace emulation {

inline __m256 low(__m512 a) { return simde__m512_to_private(a).m256[0]; }
inline __m256 high(__m512 a) { return simde__m512_to_private(a).m256[1]; }
inline __m256i low(__m512i a) { return simde__m512i_to_private(a).m256i[0]; }
inline __m256i high(__m512i a) { return simde__m512i_to_private(a).m256i[1]; }
inline __m512 join(__m256 a, __m256 b) {
    simde__m512_private r;
    r.m256[0] = a;
    r.m256[1] = b;
    return simde__m512_from_private(r);
}
inline __m512i join(__m256i a, __m256i b) {
    simde__m512i_private r;
    r.m256i[0] = a;
    r.m256i[1] = b;
    return simde__m512i_from_private(r);
}
template <int order>
inline __m512i shuffle_epi32(__m512i a) {
    return join(_mm256_shuffle_epi32(low(a), order), _mm256_shuffle_epi32(high(a), order));
}
inline __m128i upper(__m128i a) { return _mm_unpackhi_epi64(a, a); }

// SIMDe rounds the product first; the hardware does not.
inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fmadd_ps(low(a), low(b), low(c)), _mm256_fmadd_ps(high(a), high(b), high(c)));
}
inline __m512 fnmadd(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fnmadd_ps(low(a), low(b), low(c)), _mm256_fnmadd_ps(high(a), high(b), high(c)));
}
inline __m512 fmsub(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fmsub_ps(low(a), low(b), low(c)), _mm256_fmsub_ps(high(a), high(b), high(c)));
}
inline __m512 max(__m512 a, __m512 b) { return join(_mm256_max_ps(low(a), low(b)), _mm256_max_ps(high(a), high(b))); }
inline __m512 min(__m512 a, __m512 b) { return join(_mm256_min_ps(low(a), low(b)), _mm256_min_ps(high(a), high(b))); }
template <int mode>
inline __m512 round(__m512 a) {
    static_assert((mode & 0xf0) == 0, "no fraction bits here");
    return join(_mm256_round_ps(low(a), mode), _mm256_round_ps(high(a), mode));
}
inline __m512 epi32_to_ps(__m512i a) { return join(_mm256_cvtepi32_ps(low(a)), _mm256_cvtepi32_ps(high(a))); }
inline __m512i ps_to_epi32(__m512 a) { return join(_mm256_cvtps_epi32(low(a)), _mm256_cvtps_epi32(high(a))); }
inline __m512 ph_to_ps(__m256i a) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
template <int mode>
inline __m256i ps_to_ph(__m512 a) {
    return _mm256_set_m128i(_mm256_cvtps_ph(high(a), mode), _mm256_cvtps_ph(low(a), mode));
}
inline __m512i epu16_to_epi32(__m256i a) {
    return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m512i epi16_to_epi32(__m256i a) {
    return join(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)),
                _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)));
}
inline __m512i epu8_to_epi32(__m128i a) { return join(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(upper(a))); }
inline __m512i epi8_to_epi32(__m128i a) { return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(upper(a))); }
inline __m512i epu8_to_epi16(__m256i a) {
    return join(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1)));
}
template <int count>
inline __m512i shift_left_epi16(__m512i a) {
    return join(_mm256_slli_epi16(low(a), count), _mm256_slli_epi16(high(a), count));
}
template <int count>
inline __m512i shift_right_epi16(__m512i a) {
    return join(_mm256_srli_epi16(low(a), count), _mm256_srli_epi16(high(a), count));
}

inline __m512i madd_epi16(__m512i a, __m512i b) {
    return join(_mm256_madd_epi16(low(a), low(b)), _mm256_madd_epi16(high(a), high(b)));
}
inline __m512i maddubs_epi16(__m512i a, __m512i b) {
    return join(_mm256_maddubs_epi16(low(a), low(b)), _mm256_maddubs_epi16(high(a), high(b)));
}
inline __m512i shuffle_epi8(__m512i a, __m512i b) {
    return join(_mm256_shuffle_epi8(low(a), low(b)), _mm256_shuffle_epi8(high(a), high(b)));
}
inline __m512i or_all(__m512i a, __m512i b) {
    return join(_mm256_or_si256(low(a), low(b)), _mm256_or_si256(high(a), high(b)));
}
inline __m512i and_all(__m512i a, __m512i b) {
    return join(_mm256_and_si256(low(a), low(b)), _mm256_and_si256(high(a), high(b)));
}
inline __m512i xor_all(__m512i a, __m512i b) {
    return join(_mm256_xor_si256(low(a), low(b)), _mm256_xor_si256(high(a), high(b)));
}
inline void store_all(void* p, __m512i a) { std::memcpy(p, &a, 64); }
// Multiplies unsigned bytes of a by signed bytes of b and adds four neighbouring products to each int32 of sum.
inline __m256i dpbusd_half(__m256i sum, __m256i a, __m256i b) {
    const __m256i mask = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, mask), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline __m512i dpbusd(__m512i sum, __m512i a, __m512i b) {
    return join(dpbusd_half(low(sum), low(a), low(b)), dpbusd_half(high(sum), high(a), high(b)));
}

// Eight tiles of 16 rows x 64 bytes, the one configuration that the kernels use.
struct Tile {
    alignas(64) uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];

inline void tile_load(int tile, const void* base, size_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(tiles[tile].rows[r], static_cast<const char*>(base) + r * stride, 64);
}
inline void tile_store(int tile, void* base, size_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(base) + r * stride, tiles[tile].rows[r], 64);
}
inline void tile_zero(int tile) { tiles[tile] = Tile{}; }

template <typename A, typename B>
inline void tile_dot_bytes(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            int32_t sum;
            std::memcpy(&sum, tiles[c].rows[m] + 4 * n, 4);
            for (int k = 0; k < 16; ++k)
                for (int i = 0; i < 4; ++i)
                    sum += static_cast<int32_t>(static_cast<A>(tiles[a].rows[m][4 * k + i])) *
                           static_cast<int32_t>(static_cast<B>(tiles[b].rows[k][4 * n + i]));
            std::memcpy(tiles[c].rows[m] + 4 * n, &sum, 4);
        }
}

// Converts bfloat16 to float, or takes floats, and flushes subnormals to zero as the tile unit does.
inline __m256 flush(__m256 x) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
    const __m256i is_zero = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    const __m256i kept = _mm256_or_si256(_mm256_xor_si256(is_zero, _mm256_set1_epi32(-1)), _mm256_set1_epi32(1 << 31));
    return _mm256_and_ps(x, _mm256_castsi256_ps(kept));
}
struct EvenOdd {
    __m256 even, odd;
};
inline EvenOdd widen_bf16(__m256i pairs) {
    return {flush(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))),
            flush(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))))};
}

// As the manual specifies: the products of even and of odd elements are summed separately from zero, each rounded once.
// The two sums are added, then the result is added to c.
inline void tile_dot_bf16(int c, int a, int b) {
    for (int half = 0; half < 64; half += 32) {
        EvenOdd columns[16];
        for (int k = 0; k < 16; ++k)
            columns[k] = widen_bf16(_mm256_load_si256(reinterpret_cast<const __m256i*>(tiles[b].rows[k] + half)));
        for (int m = 0; m < 16; ++m) {
            __m256 even = _mm256_setzero_ps(), odd = even;
            for (int k = 0; k < 16; ++k) {
                int32_t pair;
                std::memcpy(&pair, tiles[a].rows[m] + 4 * k, 4);
                const EvenOdd row = widen_bf16(_mm256_set1_epi32(pair));
                even = flush(_mm256_fmadd_ps(row.even, columns[k].even, even));
                odd = flush(_mm256_fmadd_ps(row.odd, columns[k].odd, odd));
            }
            float* const sums = reinterpret_cast<float*>(tiles[c].rows[m] + half);
            const __m256 both = flush(_mm256_add_ps(even, odd));
            _mm256_store_ps(sums, flush(_mm256_add_ps(flush(_mm256_load_ps(sums)), both)));
        }
    }
}

// 32 float16 values. A class, so that no compiler keeps extra precision between two operations.
struct Halves {
    __m512i bits;
    explicit Halves(__m512i x) : bits(x) {}
    Halves() : bits(_mm512_setzero_si512()) {}
    explicit operator __m512i() const { return bits; }
};
// Applies f to the values as floats, eight at a time, and rounds to float16. f must be exact or round to odd.
template <typename F>
inline Halves each_half(Halves a, Halves b, Halves c, const F& f) {
    alignas(64) uint16_t x[3][32], out[32];
    std::memcpy(x[0], &a.bits, 64);
    std::memcpy(x[1], &b.bits, 64);
    std::memcpy(x[2], &c.bits, 64);
    for (int i = 0; i < 32; i += 8) {
        const auto load = [&](const uint16_t* p) {
            return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p + i)));
        };
        _mm_store_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(f(load(x[0]), load(x[1]), load(x[2])), 0));
    }
    __m512i r;
    std::memcpy(&r, out, 64);
    return Halves(r);
}
// p + c rounded to odd: if the sum is not exact, its last bit is 1. Rounding it again to fewer bits then gives the same
// result as rounding once.
inline __m256 add_to_odd(__m256 p, __m256 c) {
    const __m256 s = _mm256_add_ps(p, c), t = _mm256_sub_ps(s, p);
    const __m256 error = _mm256_add_ps(_mm256_sub_ps(p, _mm256_sub_ps(s, t)), _mm256_sub_ps(c, t));
    const __m256i bits = _mm256_castps_si256(s), one = _mm256_set1_epi32(1);
    const __m256i inexact = _mm256_castps_si256(_mm256_cmp_ps(error, _mm256_setzero_ps(), _CMP_NEQ_OQ));
    const __m256i is_even = _mm256_cmpeq_epi32(_mm256_and_si256(bits, one), _mm256_setzero_si256());
    // 1, or -1 if the error has the opposite sign.
    const __m256i other_sign = _mm256_srai_epi32(_mm256_xor_si256(bits, _mm256_castps_si256(error)), 31);
    const __m256i step = _mm256_or_si256(other_sign, one);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_and_si256(step, _mm256_and_si256(inexact, is_even))));
}
// Products of float16 are exact in float.
inline Halves fmadd_halves(Halves a, Halves b, Halves c) {
    return each_half(a, b, c, [](__m256 x, __m256 y, __m256 z) { return add_to_odd(_mm256_mul_ps(x, y), z); });
}
inline Halves operator*(Halves a, Halves b) {
    return each_half(a, b, a, [](__m256 x, __m256 y, __m256) { return _mm256_mul_ps(x, y); });
}
inline Halves operator+(Halves a, Halves b) {
    return each_half(a, b, a, [](__m256 x, __m256 y, __m256) { return add_to_odd(x, y); });
}
inline Halves operator-(Halves a, Halves b) {
    return each_half(a, b, a,
                     [](__m256 x, __m256 y, __m256) { return add_to_odd(x, _mm256_sub_ps(_mm256_setzero_ps(), y)); });
}
// a * 2^b for integers b from -126 to 127: exact in float.
inline Halves scale_halves(Halves a, Halves b) {
    return each_half(a, b, a, [](__m256 x, __m256 y, __m256) {
        const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(y), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
    });
}
inline Halves set_halves(_Float16 x) {
    uint16_t bits;
    std::memcpy(&bits, &x, 2);
    return Halves(_mm512_set1_epi16(static_cast<short>(bits)));
}
// Converts 16-bit integers of type T.
template <typename T>
inline Halves whole_to_halves(__m512i words) {
    alignas(64) T x[32];
    alignas(64) float wide[32];
    alignas(64) uint16_t out[32];
    std::memcpy(x, &words, 64);
    for (int i = 0; i < 32; ++i) wide[i] = x[i];
    for (int i = 0; i < 32; i += 8)
        _mm_store_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_load_ps(wide + i), 0));
    __m512i r;
    std::memcpy(&r, out, 64);
    return Halves(r);
}
inline __m512i mulhrs_epi16(__m512i a, __m512i b) {
    return join(_mm256_mulhrs_epi16(low(a), low(b)), _mm256_mulhrs_epi16(high(a), high(b)));
}
inline __m512i permute_epi16(__m512i places, __m512i a) {
    uint16_t from[32], x[32], out[32];
    std::memcpy(from, &places, 64);
    std::memcpy(x, &a, 64);
    for (int i = 0; i < 32; ++i) out[i] = x[from[i] & 31];
    __m512i r;
    std::memcpy(&r, out, 64);
    return r;
}
inline __m512i two_ps_to_bf16(__m512 upper_half, __m512 lower_half) {
    uint32_t x[32];
    uint16_t out[32];
    std::memcpy(x, &lower_half, 64);
    std::memcpy(x + 16, &upper_half, 64);
    for (int i = 0; i < 32; ++i) {
        const uint32_t magnitude = x[i] & 0x7fffffff;
        const uint32_t rounded = magnitude > 0x7f800000   ? x[i] | 1 << 22
                                 : magnitude < 0x00800000 ? x[i] & 0x80000000
                                                          : x[i] + 0x7fff + (x[i] >> 16 & 1);
        out[i] = static_cast<uint16_t>(rounded >> 16);
    }
    __m512i r;
    std::memcpy(&r, out, 64);
    return r;
}
// Loads 16 32-bit values of type V. Masked-out values are zero, and their memory is not read.
template <typename V>
inline V load_some(uint32_t mask, const void* p) {
    uint32_t x[16] = {};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(x + i, static_cast<const char*>(p) + 4 * i, 4);
    V r;
    std::memcpy(&r, x, 64);
    return r;
}
inline uint16_t equal_bytes(__m128i a, __m128i b) {
    return static_cast<uint16_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)));
}
inline __m512 gather_ps(__m512i places, const void* base, int scale) {
    int32_t at[16];
    float out[16];
    std::memcpy(at, &places, 64);
    for (int i = 0; i < 16; ++i) {
        const auto* const p = static_cast<const char*>(base) + static_cast<int64_t>(at[i]) * scale;
        std::memcpy(out + i, p, 4);
    }
    __m512 r;
    std::memcpy(&r, out, 64);
    return r;
}

}  // namespace emulation
}  // namespace
}  // namespace octavo

#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#undef _mm512_fmsub_ps
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_roundscale_ps
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi16_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi16
#undef _mm512_slli_epi16
#undef _mm512_srli_epi16
#define _mm512_shuffle_epi32(a, order) octavo::emulation::shuffle_epi32<order>(a)
#define _mm512_fmadd_ps(a, b, c) octavo::emulation::fmadd(a, b, c)
#define _mm512_fnmadd_ps(a, b, c) octavo::emulation::fnmadd(a, b, c)
#define _mm512_fmsub_ps(a, b, c) octavo::emulation::fmsub(a, b, c)
#define _mm512_max_ps(a, b) octavo::emulation::max(a, b)
#define _mm512_min_ps(a, b) octavo::emulation::min(a, b)
#define _mm512_roundscale_ps(a, mode) octavo::emulation::round<mode>(a)
#define _mm512_cvtepi32_ps(a) octavo::emulation::epi32_to_ps(a)
#define _mm512_cvtps_epi32(a) octavo::emulation::ps_to_epi32(a)
#define _mm512_cvtph_ps(a) octavo::emulation::ph_to_ps(a)
#define _mm512_cvtps_ph(a, mode) octavo::emulation::ps_to_ph<mode>(a)
#define _mm512_cvtepu16_epi32(a) octavo::emulation::epu16_to_epi32(a)
#define _mm512_cvtepi16_epi32(a) octavo::emulation::epi16_to_epi32(a)
#define _mm512_cvtepu8_epi32(a) octavo::emulation::epu8_to_epi32(a)
#define _mm512_cvtepi8_epi32(a) octavo::emulation::epi8_to_epi32(a)
#define _mm512_cvtepu8_epi16(a) octavo::emulation::epu8_to_epi16(a)
#define _mm512_slli_epi16(a, n) octavo::emulation::shift_left_epi16<n>(a)
#define _mm512_srli_epi16(a, n) octavo::emulation::shift_right_epi16<n>(a)

// Variadic, because an argument may contain template commas.
#undef _mm512_madd_epi16
#undef _mm512_maddubs_epi16
#undef _mm512_shuffle_epi8
#undef _mm512_or_si512
#undef _mm512_and_si512
#undef _mm512_xor_si512
#undef _mm512_storeu_si512
#undef _mm512_dpbusd_epi32
#define _mm512_madd_epi16(...) octavo::emulation::madd_epi16(__VA_ARGS__)
#define _mm512_maddubs_epi16(...) octavo::emulation::maddubs_epi16(__VA_ARGS__)
#define _mm512_shuffle_epi8(...) octavo::emulation::shuffle_epi8(__VA_ARGS__)
#define _mm512_or_si512(...) octavo::emulation::or_all(__VA_ARGS__)
#define _mm512_and_si512(...) octavo::emulation::and_all(__VA_ARGS__)
#define _mm512_xor_si512(...) octavo::emulation::xor_all(__VA_ARGS__)
#define _mm512_storeu_si512(...) octavo::emulation::store_all(__VA_ARGS__)
#define _mm512_dpbusd_epi32(...) octavo::emulation::dpbusd(__VA_ARGS__)

#undef _mm512_mulhrs_epi16
#undef _mm512_permutexvar_epi16
#undef _mm512_cvtne2ps_pbh
#undef _mm512_i32gather_ps
#define _mm512_mulhrs_epi16(...) octavo::emulation::mulhrs_epi16(__VA_ARGS__)
#define _mm512_permutexvar_epi16(...) octavo::emulation::permute_epi16(__VA_ARGS__)
#define _mm512_cvtne2ps_pbh(...) octavo::emulation::two_ps_to_bf16(__VA_ARGS__)
#define _mm512_i32gather_ps(places, base, scale) octavo::emulation::gather_ps(places, base, scale)
#undef _mm512_maskz_loadu_epi32
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_epi32(mask, p) octavo::emulation::load_some<__m512i>(mask, p)
#define _mm512_maskz_loadu_ps(mask, p) octavo::emulation::load_some<__m512>(mask, p)
#undef _mm_cmpeq_epi8_mask
#define _mm_cmpeq_epi8_mask(...) octavo::emulation::equal_bytes(__VA_ARGS__)
#define __m512h octavo::emulation::Halves
#define _mm512_fmadd_ph(...) octavo::emulation::fmadd_halves(__VA_ARGS__)
#define _mm512_scalef_ph(...) octavo::emulation::scale_halves(__VA_ARGS__)
#define _mm512_set1_ph(...) octavo::emulation::set_halves(__VA_ARGS__)
#define _mm512_setzero_ph() octavo::emulation::Halves()
#define _mm512_cvtepu16_ph(...) octavo::emulation::whole_to_halves<uint16_t>(__VA_ARGS__)
#define _mm512_cvtepi16_ph(...) octavo::emulation::whole_to_halves<int16_t>(__VA_ARGS__)

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadd(tile, base, stride) octavo::emulation::tile_load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) octavo::emulation::tile_load(tile, base, stride)
#define _tile_stored(tile, base, stride) octavo::emulation::tile_store(tile, base, stride)
#define _tile_zero(tile) octavo::emulation::tile_zero(tile)
#define _tile_dpbssd(c, a, b) octavo::emulation::tile_dot_bytes<int8_t, int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) octavo::emulation::tile_dot_bytes<int8_t, uint8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) octavo::emulation::tile_dot_bytes<uint8_t, int8_t>(c, a, b)
#define _tile_dpbuud(c, a, b) octavo::emulation::tile_dot_bytes<uint8_t, uint8_t>(c, a, b)
#define _tile_dpbf16ps(c, a, b) octavo::emulation::tile_dot_bf16(c, a, b)

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512CD__ 1
#if defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_amx)
#define __AVX512VNNI__ 1
#endif
#if defined(OCTAVO_ISA_amx)
#define __AVX512BF16__ 1
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#endif
