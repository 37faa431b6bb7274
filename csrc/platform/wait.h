// Threads that sleep until a word of memory changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo::platform {

// Sleeps while the word is `expected`, until it is woken. May return early: the caller looks again.
void sleep_while(std::atomic<uint32_t>& word, uint32_t expected);
// Wakes all threads of this process that sleep on the word, which has changed.
void wake_sleepers(std::atomic<uint32_t>& word);

// The same in memory that several processes map. Returns after `most_ms` at the latest.
void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms);
void wake_sharers(std::atomic<uint32_t>& word);

}  // namespace octavo::platform
