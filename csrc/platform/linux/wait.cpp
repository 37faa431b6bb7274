// Sleeps on a word with futexes.
#include "platform/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace octavo::platform {

void sleep_while(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms) {
    const timespec most{most_ms / 1000, most_ms % 1000 * 1000000L};
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &most, nullptr, 0);
}

void wake_sharers(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace octavo::platform
