// Processor properties that only the system knows.
#pragma once

#include <cstddef>

namespace octavo::platform {

// The size of a core's L1 data cache; 0 if unknown.
size_t level1_data_bytes();

// Asks for permission to use AMX tiles in this process. Threads that start later inherit it.
bool allow_tiles();

// Features of 64-bit ARM that all cores have; on a chip with different cores, one core cannot speak for the rest.
struct ArmFeatures {
    bool simd;
    bool dot_products;   // together with LSE and RDM, which compilers use at the same level
    bool int8_matrices;  // smmla
};
ArmFeatures arm_features();

}  // namespace octavo::platform
