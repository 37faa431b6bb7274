// Advice to macOS about pages of memory. It has no huge pages that a program could ask for.
#include <sys/mman.h>

#include "platform/pages.h"

namespace octavo::platform {

void prefer_huge_pages(void*, size_t) {}

// MADV_DONTNEED only makes them the first to be swapped.
void drop_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_FREE); }

void evict_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_DONTNEED); }

}  // namespace octavo::platform
