// Memory advice for macOS, where programs cannot request huge pages.
#include <sys/mman.h>

#include "platform/pages.h"

namespace octavo::platform {

void prefer_huge_pages(void*, size_t) {}

// MADV_DONTNEED would only make them the first to be swapped.
void drop_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_FREE); }

void evict_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_DONTNEED); }

}  // namespace octavo::platform
