// The paged cache of keys and values: layout of one block of one layer.
//
// A block holds block_size tokens (8, or a multiple of 16), head after head, each head its keys and then
// its values, as float16:
//   keys    [block_size / group][head_dim][group], group = min(block_size, 16): one vector load gives one
//           dimension of 16 keys, so scores need no horizontal sums;
//   values  [block_size][head_dim rounded up to 16], the padding is zero.
// Float16 keeps 11 bits, x86 converts it in the load; values beyond its range saturate to +-65504, NaN stays NaN.
// Only this file and the cache access functions in kernels/attention_cache.h know the element type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int32_t KV_GROUP = 16;  // keys of a vector
constexpr size_t KV_ELEMENT_BYTES = 2;

static inline int32_t kv_padded_head_dim(int32_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Bytes of the keys of one head in one block; its values follow them.
static inline size_t kv_key_bytes(int32_t head_dim, int32_t block_size) {
    return KV_ELEMENT_BYTES * static_cast<size_t>(head_dim) * block_size;
}

// Bytes of keys and values of one head in one block.
static inline size_t kv_head_bytes(int32_t head_dim, int32_t block_size) {
    return kv_key_bytes(head_dim, block_size) +
           KV_ELEMENT_BYTES * static_cast<size_t>(kv_padded_head_dim(head_dim)) * block_size;
}

// Bytes of one block of one layer, a multiple of 64.
static inline size_t kv_block_bytes(int32_t num_kv_heads, int32_t head_dim, int32_t block_size) {
    return (num_kv_heads * kv_head_bytes(head_dim, block_size) + 63) / 64 * 64;
}

static inline bool kv_block_size_is_valid(int32_t block_size) {
    return block_size == 8 || (block_size > 0 && block_size % KV_GROUP == 0);
}

}  // namespace octavo
