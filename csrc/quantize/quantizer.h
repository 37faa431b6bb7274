// The interface of the quantizers: float rows in, blocks of a ggml type out.
#pragma once

#include <cstdint>

namespace octavo {

enum class FloatType : uint8_t { f32, f16, bf16 };

// The values and the importance of rows of k columns, and where their blocks go. Rows do not depend on each other.
struct QuantizeRows {
    const float* x;           // [rows, k], finite
    const float* importance;  // [k], at least 0 and not all 0 in any block, or null: every column counts the same
    int64_t rows, k;          // k is a multiple of the type's block
    uint8_t* out;
    void* scratch;
};

// The alignment makes the size of an entry its distance in the section, whatever the compiler aligns to.
struct alignas(64) QuantizerEntry {
    const char* type_name;
    const char* isa;
    int32_t block_values, block_bytes;
    int64_t scratch_bytes;
    void (*run)(const QuantizeRows&);
    // widen.h, on the same instruction set
    bool (*widen)(const void* x, FloatType type, int64_t count, float* out);
};

}  // namespace octavo
