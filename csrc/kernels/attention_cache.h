// Loads and stores of cache elements; the layout is that of kv_cache.h.
#pragma once

#include "kernel.h"
#include "kv_cache.h"
#include "simd.h"

namespace octavo {
namespace {

using Half = uint16_t;   // float16
using Scale = uint16_t;  // bfloat16

// The element types of the cache, on which everything that reads or writes it depends.
struct HalfCache {
    using Element = Half;
    static constexpr KvType type = KvType::float16;
    static constexpr bool scaled = false;
};
struct Int8Cache {
    using Element = int8_t;
    static constexpr KvType type = KvType::int8;
    static constexpr bool scaled = true;
};

// The cache of one kv head in one layer.
struct HeadCache {
    char* data;  // the head's part of block 0
    size_t block_bytes;
    KvLayout at;
    int32_t block_size;
    KvDims dims;
    int32_t padded_dim;  // width of a value, padded
};

inline HeadCache head_cache(KvType type, const LayerCache& cache, int32_t head, KvDims dims) {
    const KvLayout at = kv_layout(type, dims, cache.block_size);
    return {static_cast<char*>(cache.data) + head * at.bytes,
            cache.block_bytes,
            at,
            cache.block_size,
            dims,
            kv_padded_dim(dims.value)};
}

#if defined(__AVX512F__)
inline F32x16 load_lanes(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}
#elif defined(__AVX2__)
inline __m256 load_codes(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F32x16 load_lanes(const int8_t* p) { return {load_codes(p), load_codes(p + 8)}; }
#elif defined(OCTAVO_NEON)
inline F32x16 load_lanes(const int8_t* p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
#else
inline F32x16 load_lanes(const int8_t* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(p[i]);
    return load(lanes);
}
#endif
inline F32x16 load_lanes(const float* p) { return load(p); }
inline F32x16 load_lanes(const Half* p) { return load_f16(p); }
inline F32x16 load_scales(const Scale* p) { return load_bf16(p); }

// The variable comes second, so that NaN stays NaN (see max and min in simd.h).
inline F32x16 clamp(F32x16 x, float limit) { return max(broadcast(-limit), min(broadcast(limit), x)); }

// Clamps to the range of float16. Infinity becomes NaN, so that a broken weight is noticed.
inline F32x16 clamp_to_half(F32x16 x) { return clamp(x, 65504.0f) + (x - x); }

inline F32x16 load_some(const float* p, int32_t n) { return n >= 16 ? load(p) : load_partial(p, n); }

// Rounds `x`, which is not negative, up to bfloat16.
inline Scale round_up(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return static_cast<Scale>((bits + 0xffff) >> 16);
}

constexpr Scale NAN_SCALE = 0x7fc0;

// Quantizes x[n] to codes[n rounded up to 16], zero beyond n, and returns their scale.
inline Scale quantize(const float* x, int32_t n, int8_t* codes) {
    F32x16 largest = broadcast(0.0f), unusable = broadcast(0.0f);
    for (int32_t i = 0; i < n; i += 16) {
        const F32x16 lanes = load_some(x + i, n - i);
        largest = max(abs(lanes), largest);
        unusable = unusable + (lanes - lanes);  // NaN for NaN and infinity, otherwise zero
    }
    const bool finite = reduce_add(unusable) == 0.0f;
    const Scale stored = finite ? round_up(reduce_max(largest) / 127.0f) : NAN_SCALE;
    if (!finite || stored == 0) {
        __builtin_memset(codes, 0, (n + 15) / 16 * 16);
        return stored;
    }
    Scale copies[16];
    for (Scale& copy : copies) copy = stored;
    const F32x16 scale = load_scales(copies);
    for (int32_t i = 0; i < n; i += 16) {
        float lanes[16];
        store(lanes, clamp(round_even(load_some(x + i, n - i) / scale), 127.0f));
        for (int lane = 0; lane < 16; ++lane) codes[i + lane] = static_cast<int8_t>(lanes[lane]);
    }
    return stored;
}

// Calls f(begin, size) for pieces of [0, n) whose sizes are powers of two, largest first.
template <typename F>
inline void for_each_power_of_two(int32_t n, F f) {
    for (int32_t begin = 0, size = 1 << 30; begin < n; size /= 2)
        if (size <= n - begin) {
            f(begin, size);
            begin += size;
        }
}

// The Walsh-Hadamard transform of each piece of x[n], not normalized.
inline void mix(float* x, int32_t n) {
    for_each_power_of_two(n, [&](int32_t begin, int32_t size) {
        for (int32_t half = 1; half < size; half *= 2)
            for (int32_t i = begin; i < begin + size; i += 2 * half)
                for (int32_t j = i; j < i + half; ++j) {
                    const float a = x[j], b = x[j + half];
                    x[j] = a + b;
                    x[j + half] = a - b;
                }
    });
}

// The same for a query, scaled so that its products with mixed keys equal the unmixed ones.
inline void mix_query(float* query, int32_t n) {
    mix(query, n);
    for_each_power_of_two(n, [&](int32_t begin, int32_t size) {
        const float factor = 1.0f / static_cast<float>(size);  // exact
        for (int32_t i = begin; i < begin + size; ++i) query[i] *= factor;
    });
}

// A token's address: its block, and its position there.
struct TokenPlace {
    char* block;
    int32_t offset;  // within the block
    int32_t group;   // keys per vector
};

inline TokenPlace place_of(const HeadCache& cache, int32_t slot) {
    return {cache.data + slot / cache.block_size * cache.block_bytes, slot % cache.block_size,
            cache.block_size < KV_GROUP ? cache.block_size : KV_GROUP};
}

// Row 0 of the token's column in an array [groups of tokens][rows][group].
template <typename T>
inline T* token_column(char* array, const TokenPlace& at, int32_t rows) {
    return reinterpret_cast<T*>(array) + at.offset / at.group * at.group * rows + at.offset % at.group;
}

// Keys may be overwritten.
inline void write_key(HalfCache, const HeadCache& cache, int32_t slot, const float* key) {
    const TokenPlace at = place_of(cache, slot);
    const int32_t dim = cache.dims.key;
    Half* to = token_column<Half>(at.block, at, dim);
    for (int32_t d = 0; d < dim; d += 16) {
        Half lanes[16];
        store_f16(lanes, clamp_to_half(load_some(key + d, dim - d)));
        for (int i = 0; i < 16 && d + i < dim; ++i) to[(d + i) * at.group] = lanes[i];
    }
}

inline void write_value(HalfCache, const HeadCache& cache, int32_t slot, const float* value) {
    const TokenPlace at = place_of(cache, slot);
    Half* to = reinterpret_cast<Half*>(at.block + cache.at.values) + at.offset * cache.padded_dim;
    for (int32_t d = 0; d < cache.dims.value; d += 16)
        store_f16(to + d, clamp_to_half(load_some(value + d, cache.dims.value - d)));
}

inline void write_key(Int8Cache, const HeadCache& cache, int32_t slot, float* key) {
    const int32_t dim = cache.dims.key;
    mix(key, dim);
    const TokenPlace at = place_of(cache, slot);
    int8_t* to = token_column<int8_t>(at.block, at, dim);
    Scale* scales = token_column<Scale>(at.block + cache.at.key_scales, at, kv_key_scales(dim));
    for (int32_t d = 0; d < dim; d += KV_SCALE_DIMS, scales += at.group) {
        const int32_t n = dim - d < KV_SCALE_DIMS ? dim - d : KV_SCALE_DIMS;
        int8_t codes[KV_SCALE_DIMS];
        *scales = quantize(key + d, n, codes);
        for (int32_t i = 0; i < n; ++i) to[(d + i) * at.group] = codes[i];
    }
}

inline void write_value(Int8Cache, const HeadCache& cache, int32_t slot, const float* value) {
    const TokenPlace at = place_of(cache, slot);
    int8_t* to = reinterpret_cast<int8_t*>(at.block + cache.at.values) + at.offset * cache.padded_dim;
    reinterpret_cast<Scale*>(at.block + cache.at.value_scales)[at.offset] = quantize(value, cache.dims.value, to);
}

// 16 consecutive keys of a sequence, from position 16 g on, and their values. The scales are null if there are none.
template <typename Cache>
struct KeyGroup {
    const typename Cache::Element* keys;    // [key_dim][16]
    const Scale* key_scales;                // [key scales][16]
    const typename Cache::Element* values;  // [16][padded_dim]; points at the keys if the cache has no values
    const Scale* value_scales;              // [16]
};

// Converts 16 dimensions of 16 keys, [16][16], to rows of floats, one per key.
inline void load_columns(const Half* dims, float* rows, int64_t stride) {
    alignas(32) Half keys[KV_GROUP * 16];
#if defined(__AVX2__)
    __m256i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(dims) + i);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm256_unpacklo_epi16(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi16(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm256_unpacklo_epi32(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi32(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 4]);
            b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 4]);
        }
    for (int i = 0; i < 8; ++i) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(keys) + i, _mm256_permute2x128_si256(b[i], b[i + 8], 0x20));
        _mm256_store_si256(reinterpret_cast<__m256i*>(keys) + i + 8, _mm256_permute2x128_si256(b[i], b[i + 8], 0x31));
    }
#else
    for (int d = 0; d < 16; ++d)
        for (int k = 0; k < KV_GROUP; ++k) keys[k * 16 + d] = dims[d * KV_GROUP + k];
#endif
    for (int k = 0; k < KV_GROUP; ++k) store(rows + k * stride, load_lanes(keys + k * 16));
}

// The group at `offset` in a block with the given layout. `block`: the head's part of that block.
template <typename Cache>
inline KeyGroup<Cache> group_at(const HeadCache& cache, const KvLayout& at, const char* block, int32_t offset) {
    using Element = typename Cache::Element;
    KeyGroup<Cache> group{};
    group.keys = reinterpret_cast<const Element*>(block) + offset * cache.dims.key;
    group.values = reinterpret_cast<const Element*>(block + at.values) + offset * cache.padded_dim;
    if (cache.padded_dim == 0) group.values = group.keys;
    if (Cache::scaled) {
        group.key_scales =
            reinterpret_cast<const Scale*>(block + at.key_scales) + offset * kv_key_scales(cache.dims.key);
        group.value_scales = reinterpret_cast<const Scale*>(block + at.value_scales) + offset;
    }
    return group;
}

// Bytes that `gather_group` needs for one group.
inline size_t gathered_group_bytes(KvType type, KvDims dims) {
    return (kv_layout(type, dims, KV_GROUP).bytes + 63) / 64 * 64;
}

// Copies rows of `bytes` each to `to`, `stride` apart. Writes zeros if `from` is null.
inline void copy_rows(char* to, const char* from, int32_t rows, size_t bytes, size_t stride) {
    for (int32_t row = 0; row < rows; ++row, to += stride) {
        if (from)
            __builtin_memcpy(to, from + row * bytes, bytes);
        else
            __builtin_memset(to, 0, bytes);
    }
}

// Gathers blocks smaller than a group into `buffer`, side by side, as if they were a block of 16 tokens.
template <typename Cache>
inline KeyGroup<Cache> gather_group(const HeadCache& cache, const int32_t* block_table, int32_t g, int32_t seq_len,
                                    char* buffer) {
    constexpr size_t element = sizeof(typename Cache::Element);
    const KvLayout whole = kv_layout(Cache::type, cache.dims, KV_GROUP), &at = cache.at;
    const int32_t size = cache.block_size, scales = kv_key_scales(cache.dims.key);
    for (int32_t lane = 0; lane < KV_GROUP; lane += size) {
        const int32_t position = g * KV_GROUP + lane;
        // No such block: use zeros, which the mask hides.
        const char* block =
            position < seq_len ? cache.data + block_table[position / size] * cache.block_bytes : nullptr;
        const auto part = [&](size_t offset) { return block ? block + offset : nullptr; };
        copy_rows(buffer + lane * element, block, cache.dims.key, size * element, KV_GROUP * element);
        copy_rows(buffer + whole.values + lane * cache.padded_dim * element, part(at.values), size,
                  cache.padded_dim * element, cache.padded_dim * element);
        if (!Cache::scaled) continue;
        copy_rows(buffer + whole.key_scales + lane * KV_SCALE_BYTES, part(at.key_scales), scales, size * KV_SCALE_BYTES,
                  KV_GROUP * KV_SCALE_BYTES);
        copy_rows(buffer + whole.value_scales + lane * KV_SCALE_BYTES, part(at.value_scales), 1, size * KV_SCALE_BYTES,
                  0);
    }
    return group_at<Cache>(cache, whole, buffer, 0);
}

template <typename Cache>
inline KeyGroup<Cache> find_group(const HeadCache& cache, const int32_t* block_table, int32_t g, int32_t seq_len,
                                  char* buffer) {
    if (cache.block_size < KV_GROUP) return gather_group<Cache>(cache, block_table, g, seq_len, buffer);
    const int32_t position = g * KV_GROUP, offset = position % cache.block_size;
    const char* block = cache.data + block_table[position / cache.block_size] * cache.block_bytes;
    return group_at<Cache>(cache, cache.at, block, offset);
}

}  // namespace
}  // namespace octavo
