// Page-granular memory for workspaces, caches and scratch: zeroed, aligned, given back at once when freed.
#pragma once

#include <cstddef>

namespace octavo {

class Memory {
  public:
    Memory() = default;
    // Throws std::bad_alloc. Large regions are aligned to 2 MiB and ask for huge pages. `guarded`: the last byte
    // lies before a page that may not be touched; the start then has only 4-byte alignment (tests).
    explicit Memory(size_t bytes, bool guarded = false);
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

}  // namespace octavo
