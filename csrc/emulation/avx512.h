// AVX-512, VNNI and AMX intrinsics on an AVX2 machine: SIMDe, what it lacks or rounds differently, and plain C++
// tiles. Forced into the wide kernels by the CMake option OCTAVO_EMULATE_AVX512; only tests use such a build.
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
inline __m128i upper(__m128i a) { return _mm_unpackhi_epi64(a, a); }

// SIMDe rounds after the product; the hardware does not.
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
// Unsigned bytes of a times signed bytes of b, four neighbours added to each int32 of sum.
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

inline float bf16_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    const uint32_t wide = (bits & 0x7f80) == 0 ? static_cast<uint32_t>(bits & 0x8000) << 16  // subnormals are zero
                                               : static_cast<uint32_t>(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
}

// The products of even and of odd k are summed apart, from zero, and both added to the sum.
inline void tile_dot_bf16(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum, parts[2] = {0.0f, 0.0f};
            std::memcpy(&sum, tiles[c].rows[m] + 4 * n, 4);
            for (int k = 0; k < 16; ++k)
                for (int i = 0; i < 2; ++i)
                    parts[i] = __builtin_fmaf(bf16_at(tiles[a].rows[m] + 4 * k + 2 * i),
                                              bf16_at(tiles[b].rows[k] + 4 * n + 2 * i), parts[i]);
            sum += parts[0] + parts[1];
            std::memcpy(tiles[c].rows[m] + 4 * n, &sum, 4);
        }
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

// Variadic: an argument may hold template commas.
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
