// Memory pages: the calls that Linux and macOS share.
#include "platform/pages.h"

#include <sys/mman.h>
#include <unistd.h>

namespace octavo::platform {

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

void* map_pages(size_t bytes) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
}

void unmap_pages(void* data, size_t bytes) { munmap(data, bytes); }

void forbid_pages(void* data, size_t bytes) { mprotect(data, bytes, PROT_NONE); }

void fetch_pages(void* data, size_t bytes) { madvise(data, bytes, MADV_WILLNEED); }

}  // namespace octavo::platform
