// Pages of memory: taken from the system, given back, and advice about them.
#pragma once

#include <cstddef>

namespace octavo::platform {

size_t page_bytes();

// Pages of zeros, which take memory once they are touched. Null: the system has none left.
void* map_pages(size_t bytes);
void unmap_pages(void* data, size_t bytes);
// Any access ends the process.
void forbid_pages(void* data, size_t bytes);

// Advice: whole pages, and a system that cannot follow it does nothing.
void prefer_huge_pages(void* data, size_t bytes);
// Gives the memory back. What is read there later is undefined.
void drop_pages(void* data, size_t bytes);
// Of a mapped file: they are needed soon, or not for some time. Their content stays.
void fetch_pages(void* data, size_t bytes);
void evict_pages(void* data, size_t bytes);

}  // namespace octavo::platform
