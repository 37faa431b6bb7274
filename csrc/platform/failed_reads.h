// Handles reads of mapped files that fail.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::platform {

// Makes the address readable, or returns false. It runs in the reading thread and must not take locks.
using ReadRepair = bool (*)(uintptr_t address);

// From now on, a failed read calls `repair` and is retried. If `repair` returns false, the failure is handled as it
// would have been before. Call this again later, because another library may have replaced the handler.
void repair_failed_reads(ReadRepair repair);

// Replaces part of a mapping by pages of zeros. Safe in a repair. first: aligned to a page.
bool put_zeros(void* first, size_t bytes);

}  // namespace octavo::platform
