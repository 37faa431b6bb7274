// Memory pages on Windows, where huge pages need a privilege that few users have.
#include "platform/pages.h"

#include "platform/windows/system.h"

namespace octavo::platform {

size_t page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

void* map_pages(size_t bytes) { return VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void unmap_pages(void* data, size_t) { VirtualFree(data, 0, MEM_RELEASE); }

void forbid_pages(void* data, size_t bytes) {
    DWORD before;
    VirtualProtect(data, bytes, PAGE_NOACCESS, &before);
}

void prefer_huge_pages(void*, size_t) {}

void drop_pages(void* data, size_t bytes) { VirtualAlloc(data, bytes, MEM_RESET, PAGE_READWRITE); }

void fetch_pages(void* data, size_t bytes) {
    WIN32_MEMORY_RANGE_ENTRY range{data, bytes};
    PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

// Unlocking pages that are not locked removes them from the working set, even though the call reports an error.
void evict_pages(void* data, size_t bytes) { VirtualUnlock(data, bytes); }

}  // namespace octavo::platform
