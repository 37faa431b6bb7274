// Loads and stores of cache elements; the layout is that of kv_cache.h.
#pragma once

#include "kernel.h"
#include "kv_cache.h"
#include "simd.h"

namespace octavo {
namespace {

using CacheElement = uint16_t;  // float16

// The cache of one kv head in one layer.
struct HeadCache {
    char* data;  // the head's part of block 0
    size_t block_bytes;
    size_t key_bytes;
    int32_t block_size;
    int32_t head_dim;
    int32_t padded_dim;
};

inline HeadCache head_cache(const LayerCache& cache, int32_t head, int32_t head_dim) {
    return {static_cast<char*>(cache.data) + head * kv_head_bytes(head_dim, cache.block_size),
            cache.block_bytes,
            kv_key_bytes(head_dim, cache.block_size),
            cache.block_size,
            head_dim,
            kv_padded_head_dim(head_dim)};
}

inline F32x16 load_lanes(const float* p) { return load(p); }
inline F32x16 load_lanes(const CacheElement* p) { return load_f16(p); }

// The variable second: NaN stays NaN (see max and min in simd.h).
inline F32x16 saturate(F32x16 x) { return max(broadcast(-65504.0f), min(broadcast(65504.0f), x)); }

inline void write_key(const HeadCache& cache, int32_t slot, const float* key) {
    const int32_t group = cache.block_size < KV_GROUP ? cache.block_size : KV_GROUP;
    const int32_t offset = slot % cache.block_size;
    CacheElement* to = reinterpret_cast<CacheElement*>(cache.data + slot / cache.block_size * cache.block_bytes) +
                       offset / group * group * cache.head_dim + offset % group;
    for (int32_t d = 0; d < cache.head_dim; d += 16) {
        const int n = cache.head_dim - d < 16 ? cache.head_dim - d : 16;
        CacheElement lanes[16];
        store_f16(lanes, saturate(n == 16 ? load(key + d) : load_partial(key + d, n)));
        for (int i = 0; i < n; ++i) to[(d + i) * group] = lanes[i];
    }
}

inline void write_value(const HeadCache& cache, int32_t slot, const float* value) {
    CacheElement* to =
        reinterpret_cast<CacheElement*>(cache.data + slot / cache.block_size * cache.block_bytes + cache.key_bytes) +
        slot % cache.block_size * cache.padded_dim;
    for (int32_t d = 0; d < cache.head_dim; d += 16) {
        const int n = cache.head_dim - d < 16 ? cache.head_dim - d : 16;
        store_f16(to + d, saturate(n == 16 ? load(value + d) : load_partial(value + d, n)));
    }
}

// Sixteen consecutive keys of a sequence, from position 16 g on, and their values.
struct KeyGroup {
    const CacheElement* keys;    // [head_dim][16]
    const CacheElement* values;  // [16][padded_dim]
};

// Elements that `gather_group` needs for one group.
inline size_t gathered_group_size(int32_t head_dim) {
    return static_cast<size_t>(KV_GROUP) * (head_dim + kv_padded_head_dim(head_dim));
}

// Blocks smaller than a group: laid side by side in `buffer`.
inline KeyGroup gather_group(const HeadCache& cache, const int32_t* block_table, int32_t g, int32_t seq_len,
                             CacheElement* buffer) {
    CacheElement *keys = buffer, *values = buffer + KV_GROUP * cache.head_dim;
    const int32_t size = cache.block_size;
    for (int32_t lane = 0; lane < KV_GROUP; lane += size) {
        const int32_t position = g * KV_GROUP + lane;
        if (position >= seq_len) {  // no such block: zeros, which the mask hides
            for (int32_t d = 0; d < cache.head_dim; ++d) __builtin_memset(keys + d * KV_GROUP + lane, 0, 2 * size);
            __builtin_memset(values + lane * cache.padded_dim, 0, sizeof(CacheElement) * size * cache.padded_dim);
            continue;
        }
        const char* block = cache.data + block_table[position / size] * cache.block_bytes;
        for (int32_t d = 0; d < cache.head_dim; ++d)
            __builtin_memcpy(keys + d * KV_GROUP + lane, block + sizeof(CacheElement) * d * size, 2 * size);
        __builtin_memcpy(values + lane * cache.padded_dim, block + cache.key_bytes,
                         sizeof(CacheElement) * size * cache.padded_dim);
    }
    return {keys, values};
}

inline KeyGroup find_group(const HeadCache& cache, const int32_t* block_table, int32_t g, int32_t seq_len,
                           CacheElement* buffer) {
    if (cache.block_size < KV_GROUP) return gather_group(cache, block_table, g, seq_len, buffer);
    const int32_t position = g * KV_GROUP, offset = position % cache.block_size;
    const char* block = cache.data + block_table[position / cache.block_size] * cache.block_bytes;
    return {reinterpret_cast<const CacheElement*>(block) + offset * cache.head_dim,
            reinterpret_cast<const CacheElement*>(block + cache.key_bytes) + offset * cache.padded_dim};
}

}  // namespace
}  // namespace octavo
