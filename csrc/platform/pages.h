// Memory pages: allocation, release and advice.
#pragma once

#include <cstddef>

namespace octavo::platform {

size_t page_bytes();

// Maps pages of zeros, which take memory only once touched. Returns null if the system has none left.
void* map_pages(size_t bytes);
void unmap_pages(void* data, size_t bytes);
// Makes any access end the process.
void forbid_pages(void* data, size_t bytes);

// The advice covers whole pages. A system that does not support it does nothing.
void prefer_huge_pages(void* data, size_t bytes);
// Returns the memory to the system. Its contents are undefined afterwards.
void drop_pages(void* data, size_t bytes);
// For a mapped file: announces that the pages are needed soon, or not for some time. Their contents stay.
void fetch_pages(void* data, size_t bytes);
void evict_pages(void* data, size_t bytes);

}  // namespace octavo::platform
