// The paged cache of keys and values: the layout of one block of one layer.
//
// A block has block_size tokens (8, or a multiple of 16). Heads follow each other, each with its keys and then its
// values:
//   keys    [block_size / group][key_dim][group], group = min(block_size, 16): one vector load gives one
//           dimension of 16 keys, so scores need no horizontal sums;
//   values  [block_size][value_dim rounded up to 16], padded with zeros.
//
// float16 keeps 11 bits, and x86 converts it in the load. Values beyond its range saturate to +-65504; NaN and infinity
// become NaN.
//
// int8 is a code from -127 to 127 times a scale: one for each 32 dimensions of a key, one for a whole value. The scales
// follow the codes: for keys [block_size / group][key_dim / 32, rounded up][group], for values [block_size]. They are
// bfloat16, which has the range of float32. The codes are chosen for the scale as stored, so its few bits cost no
// accuracy. A key or value with NaN or infinity gets the scale NaN. Before a key is stored, the layer's average key is
// subtracted, if it is known (the bias of the projection); the product of that average with the query is added to the
// scores. Then keys and queries are mixed by a Walsh-Hadamard transform, which keeps their products and spreads out the
// few large dimensions that keys tend to have (Ashkboos et al., arXiv 2404.00456). The transform of keys is not
// normalized: over n dimensions it makes them longer by sqrt(n), and queries are divided by n instead. If key_dim is
// not a power of two, it is split into pieces that are: 80 into 64 and 16.
//
// Only this file and the cache access functions in kernels/attention_cache.h know how elements are stored.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Index in KV_DTYPES (octavo/config.py).
enum class KvType : int64_t { float16, int8 };

constexpr int32_t KV_GROUP = 16;       // keys per vector
constexpr int32_t KV_SCALE_DIMS = 32;  // dimensions of a key that share a scale
constexpr size_t KV_SCALE_BYTES = 2;

static inline int32_t kv_padded_dim(int32_t value_dim) { return (value_dim + 15) / 16 * 16; }

static inline int32_t kv_key_scales(int32_t key_dim) { return (key_dim + KV_SCALE_DIMS - 1) / KV_SCALE_DIMS; }

// The dimensions of one token in a layer's cache.
struct KvDims {
    int32_t heads;  // of keys and values
    int32_t key;    // dimensions of one head
    int32_t value;
};

// Byte offsets of the parts of one head within a block. The keys are at 0.
struct KvLayout {
    size_t key_scales;
    size_t values;
    size_t value_scales;
    size_t bytes;  // size of the head
};

static inline KvLayout kv_layout(KvType type, KvDims dims, int32_t block_size) {
    const size_t tokens = static_cast<size_t>(block_size);
    const bool scaled = type == KvType::int8;
    const size_t element = scaled ? 1 : 2;
    KvLayout at{};
    at.key_scales = element * dims.key * tokens;
    at.values = at.key_scales + (scaled ? KV_SCALE_BYTES * kv_key_scales(dims.key) * tokens : 0);
    at.value_scales = at.values + element * kv_padded_dim(dims.value) * tokens;
    at.bytes = at.value_scales + (scaled ? KV_SCALE_BYTES * tokens : 0);
    return at;
}

// Bytes of one block of one layer.
static inline size_t kv_block_bytes(KvType type, KvDims dims, int32_t block_size) {
    return dims.heads * kv_layout(type, dims, block_size).bytes;
}

static inline bool kv_block_size_is_valid(int32_t block_size) {
    return block_size == 8 || (block_size > 0 && block_size % KV_GROUP == 0);
}

}  // namespace octavo
