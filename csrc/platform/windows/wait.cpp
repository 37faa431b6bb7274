// Sleeping on a word with WaitOnAddress, which knows only the threads of one process: others look again every
// millisecond.
#include "platform/wait.h"

#include "platform/windows/system.h"

namespace octavo::platform {

void sleep_while(std::atomic<uint32_t>& word, uint32_t expected) {
    WaitOnAddress(&word, &expected, sizeof expected, INFINITE);
}

void wake_sleepers(std::atomic<uint32_t>& word) { WakeByAddressAll(&word); }

void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms) {
    for (int ms = 0; ms < most_ms && word.load() == expected; ++ms) Sleep(1);
}

void wake_sharers(std::atomic<uint32_t>&) {}

}  // namespace octavo::platform
