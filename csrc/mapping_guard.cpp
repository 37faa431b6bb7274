#include "mapping_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>

namespace octavo {

namespace {

// Read by the handler, which may take no lock. A slot without a guard has an empty range.
struct Slot {
    std::atomic<uintptr_t> begin{0}, end{0};
    std::atomic<bool> is_damaged{false};
    bool is_taken = false;  // under the mutex
};

constexpr size_t NUM_SLOTS = 256;
Slot slots[NUM_SLOTS];
std::mutex slots_mutex;
struct sigaction previous;  // the handler before the first guard
bool has_previous = false;

// Puts zeros in the place of the rest of the mapping, so that the read that failed succeeds when it is tried again.
// mmap is a plain system call.
bool replace(Slot& slot, uintptr_t address) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = address / page * page, end = (slot.end.load() + page - 1) / page * page;
    slot.is_damaged.store(true);
    void* const place = reinterpret_cast<void*>(first);
    return mmap(place, end - first, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

void on_bus_error(int number, siginfo_t* info, void*) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (Slot& slot : slots)
        if (info->si_code > 0 && slot.begin.load() <= address && address < slot.end.load() && replace(slot, address))
            return;
    // Not ours: the read is tried again under the earlier handler. A signal that was sent is sent once more.
    sigaction(SIGBUS, &previous, nullptr);
    if (info->si_code <= 0) raise(number);
}

void install_handler() {
    struct sigaction now{};
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return;
    if (!has_previous) previous = now;  // one that was set later may call ours, and must not be called by it
    has_previous = true;
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

MappingGuard::MappingGuard(const void* data, size_t bytes) {
    const std::lock_guard<std::mutex> guard(slots_mutex);
    for (slot_ = 0; slot_ < NUM_SLOTS && slots[slot_].is_taken; ++slot_) {
    }
    if (slot_ == NUM_SLOTS) throw std::runtime_error("too many mapped files are guarded");
    install_handler();
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
