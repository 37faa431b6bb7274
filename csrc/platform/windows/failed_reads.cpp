// Failed reads of mapped files are not repaired on Windows: a mapped file cannot be truncated there, and part of a view
// cannot be replaced. A failing disk ends the process.
#include "platform/failed_reads.h"

namespace octavo::platform {

void repair_failed_reads(ReadRepair) {}

bool put_zeros(void*, size_t) { return false; }

}  // namespace octavo::platform
