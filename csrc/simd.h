// 16 float lanes on every instruction set: one ZMM register, two YMM registers, four NEON registers or a plain
// array.
//
// Every operation rounds in the same way, and every reduction uses the same order, so a kernel written with F32x16
// gives bit-identical results on all instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
// All compilers for 64-bit ARM have NEON; the scalar level deliberately does not use it.
#if defined(OCTAVO_ISA_neon) || defined(OCTAVO_ISA_dotprod) || defined(OCTAVO_ISA_i8mm)
#define OCTAVO_NEON 1
#include <arm_neon.h>
#endif

namespace octavo {
namespace {

#if defined(__AVX512F__)

struct F32x16 {
    __m512 v;
};
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
// a > b ? x : y, lane by lane; y if a or b is NaN
inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
inline F32x16 round_even(F32x16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// a * 2^n for integral n in [-126, 127]
inline F32x16 scale_pow2(F32x16 a, F32x16 n) {
    const __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(e))};
}
inline F32x16 load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, F32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, 0));
}
inline F32x16 load_bf16(const uint16_t* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
}

#elif defined(__AVX2__)

struct F32x16 {
    __m256 lo, hi;
};
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 abs(F32x16 a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
inline F32x16 round_even(F32x16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
inline __m256 scale_pow2_half(__m256 a, __m256 n) {
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
inline F32x16 scale_pow2(F32x16 a, F32x16 n) { return {scale_pow2_half(a.lo, n.lo), scale_pow2_half(a.hi, n.hi)}; }
inline F32x16 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_f16(uint16_t* p, F32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, 0));
}
inline __m256 load_bf16_half(const uint16_t* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
inline F32x16 load_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }

#elif defined(OCTAVO_NEON)

struct F32x16 {
    float32x4_t v[4];
};
// f(0) .. f(3) for the four registers
template <typename F>
inline F32x16 each_register(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
inline F32x16 load(const float* p) {
    return each_register([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F32x16 broadcast(float x) {
    return each_register([&](int) { return vdupq_n_f32(x); });
}
inline F32x16 operator+(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return each_register([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// Unlike vmaxq_f32, returns the second operand if one is NaN or both are zero, as on x86.
inline float32x4_t max_register(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline F32x16 max(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return max_register(a.v[i], b.v[i]); });
}
inline F32x16 min(F32x16 a, F32x16 b) {
    return each_register([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline F32x16 abs(F32x16 a) {
    return each_register([&](int i) { return vabsq_f32(a.v[i]); });
}
inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return each_register([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]); });
}
inline F32x16 round_even(F32x16 a) {
    return each_register([&](int i) { return vrndnq_f32(a.v[i]); });
}
inline F32x16 scale_pow2(F32x16 a, F32x16 n) {
    return each_register([&](int i) {
        const int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23);
        return vmulq_f32(a.v[i], vreinterpretq_f32_s32(e));
    });
}
inline F32x16 load_f16(const uint16_t* p) {
    return each_register([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_f16(uint16_t* p, F32x16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline F32x16 load_bf16(const uint16_t* p) {
    return each_register([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}

#else

struct F32x16 {
    float v[16];
};
template <typename F>
inline F32x16 each_lane(F f) {
    F32x16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
}
inline F32x16 load(const float* p) {
    return each_lane([&](int i) { return p[i]; });
}
inline void store(float* p, F32x16 a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline F32x16 broadcast(float x) {
    return each_lane([&](int) { return x; });
}
inline F32x16 operator+(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    F32x16 r;
    // Calls the C library for each lane if the processor has no such instruction. Unrolled, these calls would be most
    // of this level's code, and no faster.
#pragma GCC unroll 1
    for (int i = 0; i < 16; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return r;
}
// Like the x86 instructions, returns the second operand if one is NaN or both are zero.
inline F32x16 max(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F32x16 min(F32x16 a, F32x16 b) {
    return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F32x16 abs(F32x16 a) {
    return each_lane([&](int i) { return __builtin_fabsf(a.v[i]); });
}
inline F32x16 select_greater(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
    return each_lane([&](int i) { return a.v[i] > b.v[i] ? x.v[i] : y.v[i]; });
}
inline F32x16 round_even(F32x16 a) {
    return each_lane([&](int i) { return __builtin_rintf(a.v[i]); });
}
inline F32x16 scale_pow2(F32x16 a, F32x16 n) {
    return each_lane([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float p;
        std::memcpy(&p, &bits, 4);
        return a.v[i] * p;
    });
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        const float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t float_to_half(float f) {
    uint32_t x;
    std::memcpy(&x, &f, 4);
    const uint32_t sign = (x >> 16) & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((x >> 13) & 0x3ffu));
    if (x >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (x < 0x38800000u) {  // subnormal float16: the addition rounds to nearest even at 2^-24
        float a;
        std::memcpy(&a, &x, 4);
        const float r = a + 0.5f;
        uint32_t bits;
        std::memcpy(&bits, &r, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((x - 0x38000000u + 0xfffu + ((x >> 13) & 1u)) >> 13));
}
inline F32x16 load_f16(const uint16_t* p) {
    return each_lane([&](int i) { return half_to_float(p[i]); });
}
inline void store_f16(uint16_t* p, F32x16 a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
inline F32x16 load_bf16(const uint16_t* p) {
    return each_lane([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        float f;
        std::memcpy(&f, &bits, 4);
        return f;
    });
}

#endif

// Reductions combine lanes 8 apart, then 4, 2, 1: a fixed tree, the same on every instruction set.
#if defined(__AVX2__)
inline __m256 low_half(F32x16 a) {
#if defined(__AVX512F__)
    return _mm512_castps512_ps256(a.v);
#else
    return a.lo;
#endif
}
inline __m256 high_half(F32x16 a) {
#if defined(__AVX512F__)
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
#else
    return a.hi;
#endif
}
inline float reduce_add(F32x16 a) {
    const __m256 b = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float reduce_max(F32x16 a) {
    const __m256 b = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
#elif defined(OCTAVO_NEON)
inline float reduce_add(F32x16 a) {
    const float32x4_t b = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}
inline float reduce_max(F32x16 a) {
    const float32x4_t b = max_register(max_register(a.v[0], a.v[2]), max_register(a.v[1], a.v[3]));
    const float32x4_t c = max_register(b, vextq_f32(b, b, 2));
    return vgetq_lane_f32(c, 0) > vgetq_lane_f32(c, 1) ? vgetq_lane_f32(c, 0) : vgetq_lane_f32(c, 1);
}
#else
inline float reduce_add(F32x16 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
    return a.v[0];
}
inline float reduce_max(F32x16 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}
#endif

// The first n (0 to 16) lanes from p, the rest `fill`.
inline F32x16 load_partial(const float* p, int n, float fill = 0.0f) {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = i < n ? p[i] : fill;
    return load(t);
}
inline void store_partial(float* p, F32x16 a, int n) {
    float t[16];
    store(t, a);
    for (int i = 0; i < n; ++i) p[i] = t[i];
}

// e^x: Cody-Waite reduction by ln 2, degree-6 polynomial; relative error below 2e-7 on [-87, 88]; clamps outside,
// NaN stays NaN.
inline F32x16 exp(F32x16 x) {
    x = max(broadcast(-87.0f), min(broadcast(88.0f), x));
    const F32x16 n = round_even(x * broadcast(1.44269504088896341f));
    F32x16 r = fma(n, broadcast(-0.693359375f), x);
    r = fma(n, broadcast(2.12194440e-4f), r);
    F32x16 p = broadcast(1.0f / 720);
    p = fma(p, r, broadcast(1.0f / 120));
    p = fma(p, r, broadcast(1.0f / 24));
    p = fma(p, r, broadcast(1.0f / 6));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return scale_pow2(p, n);
}

}  // namespace
}  // namespace octavo
