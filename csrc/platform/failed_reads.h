// Reads of mapped files that the system cannot serve.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::platform {

// Makes the address readable, or returns false. It runs in the thread that reads, and may take no lock.
using ReadRepair = bool (*)(uintptr_t address);

// From now on a failed read calls `repair` and is tried again; if that returns false, the failure takes the way that it
// would have taken before. To be called again later: another library may have taken the failures over.
void repair_failed_reads(ReadRepair repair);

// Puts pages of zeros in the place of a part of a mapping; safe in a repair. first: on a page.
bool put_zeros(void* first, size_t bytes);

}  // namespace octavo::platform
