#include "memory.h"

#include <cstdint>
#include <mutex>
#include <new>

#include "platform/pages.h"

namespace octavo {
namespace {
constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t REGION = 32 * HUGE_PAGE;  // of shared memory

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
}  // namespace

Memory::Memory(size_t bytes, Pages pages) : size_(bytes) {
    if (bytes == 0) return;
    if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
    const bool guarded = pages == Pages::guarded, huge = !guarded && bytes >= HUGE_PAGE;
    const size_t page = platform::page_bytes();  // 64 KiB on some ARM systems
    const size_t payload = round_up(bytes, page);
    mapped_ = payload + (huge ? HUGE_PAGE : 0) + (guarded ? page : 0);
    mapping_ = platform::map_pages(mapped_);
    if (!mapping_) throw std::bad_alloc();
    char* const base = static_cast<char*>(mapping_);
    data_ = base;
    if (guarded) {
        platform::forbid_pages(base + payload, page);
        data_ = base + payload - round_up(bytes, 4);
    } else if (huge) {
        data_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base), HUGE_PAGE));
        const size_t small = pages == Pages::small_at_first ? HUGE_PAGE : 0;
        if (payload > small) platform::prefer_huge_pages(data_ + small, payload - small);
    }
}

Memory::~Memory() {
    if (mapping_) platform::unmap_pages(mapping_, mapped_);
}

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

struct SharedMemory::Region {
    Memory memory{REGION};
    size_t used = 0;
};

SharedMemory::SharedMemory(size_t bytes) : size_(bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Region> newest;
    const size_t size = round_up(bytes, 64);
    if (size >= HUGE_PAGE) {
        region_ = std::make_shared<Region>(Region{Memory(size), size});
        data_ = region_->memory.data();
        return;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    region_ = newest.lock();
    if (!region_ || region_->used + size > REGION) newest = region_ = std::make_shared<Region>();
    data_ = region_->memory.data() + region_->used;
    region_->used += size;
}

SharedMemory::~SharedMemory() {
    if (!region_) return;
    const size_t page = platform::page_bytes();
    const uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(data_), page);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_) + size_) / page * page;
    if (begin < end) platform::drop_pages(reinterpret_cast<void*>(begin), end - begin);
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
    std::swap(region_, other.region_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

}  // namespace octavo
