// Facts about the processor that only the system knows.
#pragma once

#include <cstddef>

namespace octavo::platform {

// Of the first cache for data of a core; 0: the system does not say.
size_t level1_data_bytes();

// Asks for the permission to use AMX tiles in this process; threads that start later have it too.
bool allow_tiles();

// Features of 64-bit ARM that all cores have: on a chip of unlike cores, one of them cannot speak for the rest.
struct ArmFeatures {
    bool simd;
    bool dot_products;   // with LSE and RDM, which compilers use at the same level
    bool int8_matrices;  // smmla
};
ArmFeatures arm_features();

}  // namespace octavo::platform
