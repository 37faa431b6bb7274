// The interface of the quantizers: float rows in, blocks of a ggml type out.
#pragma once

#include <cstdint>

namespace octavo {

enum class FloatType : uint8_t { f32, f16, bf16 };

// Values and importance of rows of k columns, and the destination of their blocks. Rows are independent.
struct QuantizeRows {
    const float* x;           // [rows, k], finite
    const float* importance;  // [k], nonnegative and not all 0 in any block, or null: all columns count equally
    int64_t rows, k;          // k is a multiple of the type's block
    uint8_t* out;
    void* scratch;
};

// The alignment fixes the distance between entries in the section, independent of the compiler's own alignment.
struct alignas(64) QuantizerEntry {
    const char* type_name;
    const char* isa;
    int32_t block_values, block_bytes;
    int64_t scratch_bytes;
    void (*run)(const QuantizeRows&);
    // widen.h, for the same instruction set
    bool (*widen)(const void* x, FloatType type, int64_t count, float* out);
};

}  // namespace octavo
