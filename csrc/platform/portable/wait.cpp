// Sleeps on a word without system calls. Used in place of SYSTEM/wait.cpp on systems without suitable ones.
#include "platform/wait.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace octavo::platform {
namespace {

// Words share a few conditions. A thread woken for another word goes back to sleep.
struct Bed {
    std::mutex mutex;
    std::condition_variable changed;
};

Bed& bed_of(const void* word) {
    constexpr uintptr_t NUM_BEDS = 64, CACHE_LINE = 64;
    static Bed* const beds = new Bed[NUM_BEDS];  // never destroyed, because a thread may sleep at exit
    return beds[reinterpret_cast<uintptr_t>(word) / CACHE_LINE % NUM_BEDS];
}

}  // namespace

void sleep_while(std::atomic<uint32_t>& word, uint32_t expected) {
    Bed& bed = bed_of(&word);
    std::unique_lock<std::mutex> lock(bed.mutex);
    bed.changed.wait(lock, [&] { return word.load() != expected; });
}

void wake_sleepers(std::atomic<uint32_t>& word) {
    Bed& bed = bed_of(&word);
    {
        const std::lock_guard<std::mutex> guard(bed.mutex);
    }  // the sleeper has either checked the word or is asleep
    bed.changed.notify_all();
}

void sleep_while_shared(std::atomic<uint32_t>& word, uint32_t expected, int most_ms) {
    for (int ms = 0; ms < most_ms && word.load() == expected; ++ms)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void wake_sharers(std::atomic<uint32_t>&) {}

}  // namespace octavo::platform
