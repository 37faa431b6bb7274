// Handles failed reads of mapped files through the signal SIGBUS.
#include "platform/failed_reads.h"

#include <signal.h>
#include <sys/mman.h>

namespace octavo::platform {
namespace {

ReadRepair repair_read = nullptr;
struct sigaction previous;  // the handler installed before ours
bool has_previous = false;

void on_bus_error(int number, siginfo_t* info, void*) {
    // Signals sent by another process have no address.
    if (info->si_code > 0 && repair_read(reinterpret_cast<uintptr_t>(info->si_addr))) return;
    // Not ours: the read is retried under the earlier handler. A signal that was sent is sent again.
    sigaction(SIGBUS, &previous, nullptr);
    if (info->si_code <= 0) raise(number);
}

}  // namespace

void repair_failed_reads(ReadRepair repair) {
    repair_read = repair;
    struct sigaction now{};
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return;
    if (!has_previous) previous = now;  // a handler installed later may call ours, so do not chain to it
    has_previous = true;
    struct sigaction ours{};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

// mmap is a plain system call, so a handler may use it.
bool put_zeros(void* first, size_t bytes) {
    return mmap(first, bytes, PROT_READ, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1, 0) != MAP_FAILED;
}

}  // namespace octavo::platform
