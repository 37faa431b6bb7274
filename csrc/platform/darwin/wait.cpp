// Sleeps on a word with the calls that libc++ uses for std::atomic::wait. They have existed since macOS 10.12; the
// public ones (os_sync_wait_on_address) only since 14.4.
#include "platform/wait.h"

extern "C" {
int __ulock_wait(uint32_t operation, void* address, uint64_t value, uint32_t timeout_us);
int __ulock_wake(uint32_t operation, void* address, uint64_t wake_value);
}

namespace octavo::platform {
namespace {
constexpr uint32_t COMPARE_AND_WAIT = 1, COMPARE_AND_WAIT_SHARED = 3, WAKE_ALL = 0x100;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t expected) { __ulock_wait(COMPARE_AND_WAIT, &word, expected, 0); }

void wake_sleepers(std::atomic<uint32_t>& word) { __ulock_wake(COMPARE_AND_WAIT | WAKE_ALL, &word, 0); }

void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms) {
    __ulock_wait(COMPARE_AND_WAIT_SHARED, &word, expected, static_cast<uint32_t>(most_ms) * 1000);
}

void wake_sharers(std::atomic<uint32_t>& word) { __ulock_wake(COMPARE_AND_WAIT_SHARED | WAKE_ALL, &word, 0); }

}  // namespace octavo::platform
