// What the packed quantized types mean to the linear kernels, and the one arithmetic that all of them follow.
//
// For output column n and one row of activations, quantized to int8 a with one scale per unit of 32 k
//     s_a = max|x| / 127,  a = round to nearest even(x * (127 / max|x|)),  A = s_a * float(sum of a)
// units are taken in increasing order, y starting at 0, and for each
//     I = sum over half units j of scale_j * sum over k of (u - zero) * a       exact in int32
//     y = fma(float(I), s * s_a, y)
//     y = fma(m, A, y)                      types with one minimum a unit
//     y = fma(m_j, A_j, y), j = 0, 1        Q2_K: a minimum for each half unit
// where scale_j is 1 except for Q2_K, Q3_K and Q6_K. Dense types: y = fma(w, x, y) in increasing k. Every
// instruction set does exactly this, for any number of rows and threads, so all results agree bit for bit.
#pragma once

#include "packed_weight.h"
#include "simd.h"
#include "unroll.h"

namespace octavo {
namespace {

template <WeightType T>
struct TypeTag {
    static constexpr WeightType type = T;
};

// Calls f with the tag of a quantized type.
template <typename F>
inline auto with_quantized_type(WeightType type, const F& f) {
    switch (type) {
        case WeightType::Q4_0:
            return f(TypeTag<WeightType::Q4_0>{});
        case WeightType::Q4_1:
            return f(TypeTag<WeightType::Q4_1>{});
        case WeightType::Q5_0:
            return f(TypeTag<WeightType::Q5_0>{});
        case WeightType::Q5_1:
            return f(TypeTag<WeightType::Q5_1>{});
        case WeightType::Q2_K:
            return f(TypeTag<WeightType::Q2_K>{});
        case WeightType::Q3_K:
            return f(TypeTag<WeightType::Q3_K>{});
        case WeightType::Q4_K:
            return f(TypeTag<WeightType::Q4_K>{});
        case WeightType::Q5_K:
            return f(TypeTag<WeightType::Q5_K>{});
        case WeightType::Q6_K:
            return f(TypeTag<WeightType::Q6_K>{});
        case WeightType::IQ4_NL:
            return f(TypeTag<WeightType::IQ4_NL>{});
        case WeightType::IQ4_XS:
            return f(TypeTag<WeightType::IQ4_XS>{});
        case WeightType::MXFP4:
            return f(TypeTag<WeightType::MXFP4>{});
        default:
            return f(TypeTag<WeightType::Q8_0>{});
    }
}

template <WeightType T>
struct Format {
    static constexpr PanelLayout layout = panel_layout(T);
    static constexpr bool has_triples = T == WeightType::Q6_K;
    static constexpr bool has_nibbles =
        T != WeightType::Q8_0 && T != WeightType::Q2_K && T != WeightType::Q3_K && !has_triples;
    static constexpr bool is_iq4 = T == WeightType::IQ4_NL || T == WeightType::IQ4_XS;
    // Signed byte codes; all others are unsigned codes below 64.
    static constexpr bool is_wide = T == WeightType::Q8_0 || is_iq4;
    // Where the bit plane lies in a unit and which bit of the code it holds; -1: none.
    static constexpr int bits_offset = T == WeightType::Q5_0 || T == WeightType::Q5_1 || T == WeightType::Q5_K ? 256
                                       : T == WeightType::Q3_K                                                 ? 128
                                                                                                               : -1;
    static constexpr int bits_place = T == WeightType::Q3_K ? 2 : 4;
    static constexpr bool has_pairs = T == WeightType::Q2_K || T == WeightType::Q3_K;
    static constexpr int zero = T == WeightType::Q4_0    ? 8
                                : T == WeightType::Q5_0  ? 16
                                : T == WeightType::Q6_K  ? 32
                                : T == WeightType::Q3_K  ? 4
                                : T == WeightType::MXFP4 ? 12
                                                         : 0;
    static constexpr bool has_half_scales = T == WeightType::Q2_K || T == WeightType::Q3_K || T == WeightType::Q6_K;
    static constexpr bool has_k_mins = T == WeightType::Q4_K || T == WeightType::Q5_K;
    static constexpr int mins = T == WeightType::Q2_K                                          ? 2
                                : has_k_mins || T == WeightType::Q4_1 || T == WeightType::Q5_1 ? 1
                                                                                               : 0;
    static constexpr int max_code = bits_offset == 256       ? 31
                                    : T == WeightType::Q6_K  ? 63
                                    : T == WeightType::MXFP4 ? 24
                                                             : 15;
};

#if defined(__AVX512F__)
inline F32x16 load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32x16 load_i8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif defined(__AVX2__)
inline F32x16 load_u8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32x16 load_i8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
#elif defined(OCTAVO_NEON)
inline F32x16 load_u8(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_high_u8(x);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))}};
}
inline F32x16 load_i8(const uint8_t* p) {
    const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_high_s16(lo)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_high_s16(hi))}};
}
#else
inline F32x16 load_u8(const uint8_t* p) {
    return each_lane([&](int i) { return static_cast<float>(p[i]); });
}
inline F32x16 load_i8(const uint8_t* p) {
    return each_lane([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}
#endif

inline F32x16 load_halves(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }

// 2^(e - 128): the scale of MXFP4 with doubled values. Exponents 0 and 1 give subnormal numbers.
inline float mxfp4_scale(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline F32x16 load_mxfp4_scales(const uint8_t* p) {
    float t[16];
    for (int i = 0; i < 16; ++i) t[i] = mxfp4_scale(p[i]);
    return load(t);
}

#if defined(__AVX512F__)
inline F32x16 load_high_nibbles(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(x), 4))};
}
#else
inline F32x16 load_high_nibbles(const uint8_t* p) {
    uint8_t t[16];
    for (int i = 0; i < 16; ++i) t[i] = p[i] >> 4;
    return load_u8(t);
}
#endif

// Where the 16 bytes of scale_j lie.
template <WeightType T>
inline const uint8_t* half_scales(const uint8_t* header, int unit, int half) {
    return header + (T == WeightType::Q2_K ? 64 : 32) + 16 * (2 * unit + half);
}

// scale_j of one column.
template <WeightType T>
inline int half_scale(const uint8_t* header, int unit, int half, int column) {
    if constexpr (!Format<T>::has_half_scales) return 1;
    const uint8_t byte = half_scales<T>(header, unit, half)[column];
    return T == WeightType::Q2_K ? byte & 15 : static_cast<int8_t>(byte);
}

// The code of one value: u, or the signed value of the wide types. k and column within the unit.
template <WeightType T>
inline int unit_code(const uint8_t* codes, int k, int column) {
    using F = Format<T>;
    const int quad = k / 4, byte = column * 4 + k % 4;
    if constexpr (T == WeightType::Q8_0) return static_cast<int8_t>(codes[64 * quad + byte]);
    if constexpr (F::has_triples) {
        const uint8_t* const triple = codes + TRIPLE_BYTES * (quad / 4) + byte;
        if (quad % 4 < 3) return triple[64 * (quad % 4)] & 63;
        return triple[0] >> 6 | triple[64] >> 6 << 2 | triple[128] >> 6 << 4;
    }
    int u = 0;
    if constexpr (F::has_nibbles) u = codes[64 * (quad / 2) + byte] >> (4 * (quad % 2)) & 15;
    if constexpr (F::is_iq4) return IQ4_VALUES[u];
    if constexpr (T == WeightType::MXFP4) return MXFP4_VALUES[u];
    if constexpr (F::has_pairs) u = codes[64 * (quad / 4) + byte] >> (2 * (quad % 4)) & 3;
    if constexpr (F::bits_offset >= 0) u |= (codes[F::bits_offset + byte] >> quad & 1) << F::bits_place;
    return u;
}

// A walk over `count` units of a panel. What all units of a super-block share is converted once.
template <WeightType T>
struct UnitCursor {
    const uint8_t* header;
    int unit;  // in the super-block

    UnitCursor(const uint8_t* panel, int first, int count)
        : header(panel + first / Format<T>::layout.units() * static_cast<int64_t>(Format<T>::layout.block_bytes())),
          unit(first % Format<T>::layout.units()),
          left_(count) {
        load_header();
    }
    const uint8_t* codes() const {
        return header + Format<T>::layout.header_bytes + unit * Format<T>::layout.unit_bytes;
    }
    // s of the unit, 16 columns.
    F32x16 scales() const {
        if constexpr (Format<T>::has_k_mins)
            return scale_ * load_u8(header + 64 + 16 * unit);
        else if constexpr (T == WeightType::IQ4_XS)
            return scale_ * load_i8(header + 32 + 16 * unit);
        else
            return scale_;
    }
    // m of the unit, or m_j for j = `half`.
    F32x16 mins([[maybe_unused]] int half) const {
        if constexpr (Format<T>::has_k_mins)
            return min_ * load_u8(header + 192 + 16 * unit);
        else if constexpr (T == WeightType::Q2_K)
            return min_ * load_high_nibbles(header + 64 + 16 * (2 * unit + half));
        else
            return min_;
    }
    // After the last unit, `header` is that of the next one, if there is any.
    void next() {
        --left_;
        if (++unit == Format<T>::layout.units()) {
            unit = 0;
            header += Format<T>::layout.block_bytes();
            if (left_ > 0) load_header();
        }
    }

  private:
    int left_;
    F32x16 scale_, min_;

    void load_header() {
        scale_ = T == WeightType::MXFP4 ? load_mxfp4_scales(header) : load_halves(header);
        if constexpr (Format<T>::mins > 0) min_ = load_halves(header + 32);
        if constexpr (Format<T>::has_k_mins || T == WeightType::Q2_K) min_ = broadcast(0.0f) - min_;
    }
};

}  // namespace
}  // namespace octavo
