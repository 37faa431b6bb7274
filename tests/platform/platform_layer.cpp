// The platform layer of csrc on this system, or its fallbacks: prints "the platform layer works", or the first failure.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "platform/features.h"
#include "platform/pages.h"
#include "platform/registry.h"
#include "platform/sharing.h"
#include "platform/threads.h"
#include "platform/wait.h"

namespace platform = octavo::platform;

struct alignas(64) Listed {
    int value;
};
OCTAVO_LISTED(numbers) static const Listed first{20};
OCTAVO_LISTED(numbers) static const Listed second{22};
OCTAVO_LIST(Listed, numbers)

namespace {

void check(bool holds, const char* what) {
    if (holds) return;
    std::printf("failed: %s\n", what);
    std::exit(1);
}

// Threads that hand a number on, each asleep until it is its turn. They end only if no wake is lost.
void pass_on(bool shared) {
    constexpr uint32_t THREADS = 3, ROUNDS = 200;
    alignas(64) std::atomic<uint32_t> turn{0};
    const auto play = [&](uint32_t own) {
        for (uint32_t round = 0; round < ROUNDS; ++round) {
            for (uint32_t seen = turn.load(); seen != round * THREADS + own; seen = turn.load()) {
                if (shared)
                    platform::sleep_while_shared(turn, seen, 60000);
                else
                    platform::sleep_while(turn, seen);
            }
            turn.fetch_add(1);
            if (shared)
                platform::wake_sharers(turn);
            else
                platform::wake_sleepers(turn);
        }
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < THREADS; ++i) threads.emplace_back(play, i);
    for (std::thread& thread : threads) thread.join();
    check(turn.load() == THREADS * ROUNDS, "threads that wait for a word take turns");
}

void sleep_without_cause() {
    std::atomic<uint32_t> word{1};
    platform::sleep_while(word, 0);             // it has another value: no sleep
    platform::sleep_while_shared(word, 1, 20);  // nobody wakes it: it returns in time
}

void take_pages() {
    const size_t page = platform::page_bytes();
    check(page >= 4096 && (page & (page - 1)) == 0, "a page is a power of two");
    const size_t bytes = 8 * page;
    char* const data = static_cast<char*>(platform::map_pages(bytes));
    check(data && data[0] == 0 && data[bytes - 1] == 0, "new pages hold zeros");
    std::memset(data, 7, bytes);
    platform::prefer_huge_pages(data, bytes);
    platform::fetch_pages(data, bytes);
    platform::drop_pages(data + page, page);
    check(data[0] == 7 && data[2 * page] == 7, "pages beside dropped ones keep their content");
    data[page] = 1;
    check(data[page] == 1, "a dropped page can be written again");
    platform::forbid_pages(data + 7 * page, page);
    platform::unmap_pages(data, bytes);
}

void share() {
    const std::string name = "octavo-0123456789abcdef-" + std::to_string(platform::process_id() % 10000) + "-0";
    constexpr size_t BYTES = 100 * 4096;
    check(!platform::SharedSegment::open(name, BYTES).data(), "a segment that nobody made has no memory");
    int placement_error = -1;
    {
        platform::SharedSegment made = platform::SharedSegment::create(name, BYTES, -1, &placement_error);
        check(made.data() && placement_error == 0, "a segment is made");
        const platform::SharedSegment found = platform::SharedSegment::open(name, BYTES);
        check(found.data() && found.data() != made.data(), "another map of it is found");
        static_cast<char*>(made.data())[BYTES - 1] = 42;
        check(static_cast<const char*>(found.data())[BYTES - 1] == 42, "both see the same memory");
        bool is_refused = false;
        try {
            platform::SharedSegment::create(name, BYTES, -1, &placement_error);
        } catch (const std::runtime_error& error) {
            is_refused = std::string(error.what()).find("is this rank already running?") != std::string::npos;
        }
        check(is_refused, "a name that is taken is refused");
        made.remove_name();
        check(static_cast<const char*>(found.data())[BYTES - 1] == 42, "the memory outlives the name");
    }
    check(!platform::SharedSegment::open(name, BYTES).data(), "nothing is left of a segment");
}

void name_and_block() {
    std::thread([] {
        const platform::BlockedSignals blocked;
        platform::name_thread("octavo-test");
    }).join();
    check(platform::process_id() > 0, "a process has a number");
    const platform::ArmFeatures arm = platform::arm_features();
    check(!arm.int8_matrices || arm.simd, "matrices of int8 need SIMD");
    std::printf("level 1 data cache: %zu bytes\n", platform::level1_data_bytes());
}

void read_the_list() {
    int sum = 0, count = 0;
    for (const Listed* each = octavo_first_of_numbers(); each != octavo_end_of_numbers(); ++each, ++count)
        sum += each->value;
    check(count == 2 && sum == 42, "the list has every entry once");
}

}  // namespace

int main() {
    read_the_list();
    sleep_without_cause();
    pass_on(false);
    pass_on(true);
    take_pages();
    share();
    name_and_block();
    std::printf("the platform layer works\n");
}
