// Page-granular memory for workspaces, caches, scratch and weights: zeroed, aligned, returned immediately when freed.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace octavo {

enum class Pages {
    huge,            // aligns large regions to 2 MiB and asks for huge pages
    small_at_first,  // the same after the first 2 MiB: for barely used regions, where each first access clears a page
    guarded,         // ends right before an inaccessible page; 4-byte alignment (tests)
};

class Memory {
  public:
    Memory() = default;
    // Throws std::bad_alloc.
    explicit Memory(size_t bytes, Pages pages = Pages::huge);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void* mapping_ = nullptr;
    size_t mapped_ = 0;
    char* data_ = nullptr;
    size_t size_ = 0;
};

// Memory whose huge pages are shared with other objects of this class. A matrix smaller than 2 MiB gets no huge page of
// its own, and without them a model with many small matrices spends its time on page tables. Aligned to 64 bytes.
class SharedMemory {
  public:
    SharedMemory() = default;
    // Throws std::bad_alloc.
    explicit SharedMemory(size_t bytes);
    ~SharedMemory();  // returns whole pages immediately, and partial pages together with the last user of the region
    SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
    SharedMemory& operator=(SharedMemory&& other) noexcept;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    char* data() const { return data_; }

  private:
    struct Region;
    std::shared_ptr<Region> region_;
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace octavo
