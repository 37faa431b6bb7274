// Lets threads sleep until a word of memory changes.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo::platform {

// Sleeps while the word is `expected`, until woken. May return early, so the caller must check again.
void sleep_while(std::atomic<uint32_t>& word, uint32_t expected);
// Wakes all threads of this process that sleep on the word, which must have changed.
void wake_sleepers(std::atomic<uint32_t>& word);

// The same for memory that several processes map. Returns after at most `most_ms`.
void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms);
void wake_sharers(std::atomic<uint32_t>& word);

}  // namespace octavo::platform
