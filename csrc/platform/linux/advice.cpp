// Memory advice for Linux.
#include <sys/mman.h>

#include "platform/pages.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21  // Linux 5.4
#endif

namespace octavo::platform {

// Kernels without huge pages refuse this, which is harmless.
void prefer_huge_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_HUGEPAGE); }

void drop_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_DONTNEED); }

// Older systems refuse this, and evict what was unused for longest.
void evict_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_PAGEOUT); }

}  // namespace octavo::platform
