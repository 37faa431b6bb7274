// Failed reads of mapped files on Windows, which are not repaired: nobody can truncate a file that is mapped there, and
// part of a view cannot be replaced. A disk that fails ends the process.
#include "platform/failed_reads.h"

namespace octavo::platform {

void repair_failed_reads(ReadRepair) {}

bool put_zeros(void*, size_t) { return false; }

}  // namespace octavo::platform
