// Sleeps on a word with WaitOnAddress, which works only within one process; other processes check again at every clock
// tick.
#include "platform/wait.h"

#include "platform/windows/system.h"

namespace octavo::platform {

void sleep_while(std::atomic<uint32_t>& word, uint32_t expected) {
    WaitOnAddress(&word, &expected, sizeof expected, INFINITE);
}

void wake_sleepers(std::atomic<uint32_t>& word) { WakeByAddressAll(&word); }

void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms) {
    const ULONGLONG end = GetTickCount64() + static_cast<ULONGLONG>(most_ms);
    while (word.load() == expected && GetTickCount64() < end) Sleep(1);
}

void wake_sharers(std::atomic<uint32_t>&) {}

}  // namespace octavo::platform
