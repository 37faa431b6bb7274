// The instruction sets of this machine, and the kernels for each.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace octavo {

// Each level contains the ones before it.
#if defined(__aarch64__)
enum class Isa { scalar, neon, dotprod, i8mm };
constexpr int NUM_ISAS = 4;
#else
enum class Isa { scalar, avx2, avx512, avx512vnni, amx };
constexpr int NUM_ISAS = 5;
#endif

const char* isa_name(Isa isa);

// Throws std::invalid_argument listing the known levels.
Isa parse_isa(const std::string& name);

// The highest level that the processor, the operating system and this build support. The first call asks the system for
// permission to use AMX, so it must come before the worker threads start.
Isa detect_isa();

// The kernel of an operation for the highest level up to `level`; null if the operation has no kernel.
const KernelEntry* find_kernel(const std::string& name, Isa level);

// All operations that have a kernel.
std::vector<std::string> kernel_names();

// True if kernels of this level use AMX tiles.
bool uses_tiles(Isa isa);

// Configures eight AMX tiles of 16 rows x 64 bytes for the calling thread, or releases them so that the operating
// system need not save them. Call these only on machines with AMX.
void load_tile_configuration();
void release_tiles();

}  // namespace octavo
