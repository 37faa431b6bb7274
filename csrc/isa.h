// The instruction sets of this machine, and the kernels of each.
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

// Throws std::invalid_argument naming the known levels.
Isa parse_isa(const std::string& name);

// The highest level that processor, operating system and this build allow. Asks the system for the permission to use
// AMX the first time, which must precede the worker threads.
Isa detect_isa();

// The best entry of an operation at or below a level; null if the operation has no kernel.
const KernelEntry* find_kernel(const std::string& name, Isa level);

// All operations that have a kernel.
std::vector<std::string> kernel_names();

// True if kernels of this level use AMX tiles.
bool uses_tiles(Isa isa);

// AMX: eight tiles of 16 rows x 64 bytes for the calling thread, and back to none so that the operating
// system need not save them. No-ops on machines without AMX are the caller's business.
void load_tile_configuration();
void release_tiles();

}  // namespace octavo
