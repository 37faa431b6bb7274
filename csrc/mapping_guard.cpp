#include "mapping_guard.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>

#include "platform/failed_reads.h"
#include "platform/pages.h"

namespace octavo {

namespace {

// Read by the signal handler, which must not take a lock. A slot without a guard has an empty range.
struct Slot {
    std::atomic<uintptr_t> begin{0}, end{0};
    std::atomic<bool> is_damaged{false};
    bool is_taken = false;  // protected by the mutex
};

constexpr size_t NUM_SLOTS = 256;
Slot slots[NUM_SLOTS];
std::mutex slots_mutex;

// Replaces the rest of the mapping by zeros, so that the failed read succeeds when it is retried.
bool replace(Slot& slot, uintptr_t address) {
    const uintptr_t page = platform::page_bytes();
    const uintptr_t first = address / page * page, end = (slot.end.load() + page - 1) / page * page;
    slot.is_damaged.store(true);
    return platform::put_zeros(reinterpret_cast<void*>(first), end - first);
}

bool repair(uintptr_t address) {
    for (Slot& slot : slots)
        if (slot.begin.load() <= address && address < slot.end.load() && replace(slot, address)) return true;
    return false;
}

}  // namespace

MappingGuard::MappingGuard(const void* data, size_t bytes) {
    const std::lock_guard<std::mutex> guard(slots_mutex);
    for (slot_ = 0; slot_ < NUM_SLOTS && slots[slot_].is_taken; ++slot_) {
    }
    if (slot_ == NUM_SLOTS) throw std::runtime_error("too many mapped files, at most 256 can be guarded");
    platform::repair_failed_reads(repair);
    Slot& slot = slots[slot_];
    slot.is_taken = true;
    slot.is_damaged.store(false);
    slot.begin.store(reinterpret_cast<uintptr_t>(data));
    slot.end.store(reinterpret_cast<uintptr_t>(data) + bytes);
}

MappingGuard::~MappingGuard() {
    const std::lock_guard<std::mutex> guard(slots_mutex);
    Slot& slot = slots[slot_];
    slot.end.store(0);
    slot.begin.store(0);
    slot.is_taken = false;
}

bool MappingGuard::is_damaged() const { return slots[slot_].is_damaged.load(); }

}  // namespace octavo
