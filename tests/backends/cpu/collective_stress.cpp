// Sums and gathered columns by ranks that are threads of one process, each with a pool; ranks that come late, one that
// gives up, and one that ends. The segments replace those of the platform layer: all ranks have them at one address,
// where a sanitizer sees what the ranks share.
//
// Usage: collective_stress ROUNDS
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective.h"
#include "isa.h"
#include "platform/sharing.h"
#include "thread_pool.h"

namespace octavo::platform {
namespace {

using Pages = std::shared_ptr<void>;

std::mutex names_mutex;
std::map<std::string, Pages> names;

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, size_t bytes, int32_t, int*) {
    const Pages pages(std::aligned_alloc(4096, bytes), std::free);
    std::memset(pages.get(), 0, bytes);
    SharedSegment made;
    made.data_ = pages.get();
    made.name_ = name;
    made.handle_ = new Pages(pages);
    const std::lock_guard<std::mutex> lock(names_mutex);
    if (!names.emplace(name, pages).second) std::abort();
    return made;
}

SharedSegment SharedSegment::open(const std::string& name, size_t) {
    SharedSegment found;
    const std::lock_guard<std::mutex> lock(names_mutex);
    const auto at = names.find(name);
    if (at == names.end()) return found;
    found.data_ = at->second.get();
    found.handle_ = new Pages(at->second);
    return found;
}

SharedSegment::~SharedSegment() {
    remove_name();
    delete static_cast<Pages*>(handle_);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(name_, other.name_);
    std::swap(handle_, other.handle_);
    return *this;
}

void SharedSegment::remove_name() {
    const std::lock_guard<std::mutex> lock(names_mutex);
    names.erase(name_);
    name_.clear();
}

}  // namespace octavo::platform

namespace {

using octavo::CollectiveGroup;

constexpr size_t BUFFER_BYTES = size_t{1} << 17;  // larger than a piece that every rank adds up by itself
constexpr int32_t MAX_ROWS = 60, MAX_COLS = 900;  // several buffers

struct Setting {
    int32_t size;
    int workers, spin_us;
};

octavo::GroupOptions options_of(const Setting& setting, int32_t rank) {
    octavo::GroupOptions options;
    options.name = "stress";
    options.rank = rank;
    options.size = setting.size;
    options.buffer_bytes = BUFFER_BYTES;
    options.silence_ms = 60000;  // a sanitizer and other programs may hold a rank up
    options.spin_us = setting.spin_us;
    return options;
}

octavo::PoolOptions options_of(const Setting& setting) {
    octavo::PoolOptions options;
    options.count = setting.workers;
    options.barrier_spin_us = options.idle_spin_us = setting.spin_us;
    return options;
}

// False if a rank is gone.
bool exchange(CollectiveGroup& group, octavo::ThreadPool& pool, const char* kernel, octavo::View x, octavo::View out) {
    struct Job {
        octavo::KernelFn run;
        octavo::Args args;
    } job{octavo::find_kernel(kernel, octavo::Isa::scalar)->run, {}};
    job.args.inputs = &x;
    job.args.output = out;
    job.args.shared_scratch = group.exchange();
    const auto work = [](void* context, octavo::Worker& worker, size_t) {
        Job& task = *static_cast<Job*>(context);
        task.run(task.args, octavo::Step{}, worker);
    };
    pool.run(work, &job);
    return group.exchange()->met;
}

// Whole numbers, so that every order of a sum gives the same.
float value(int32_t rank, int32_t row, int32_t col) { return static_cast<float>((rank + 1) * (31 * row + col) % 1009); }

std::vector<float> values(int32_t rank, int32_t rows, int32_t cols) {
    std::vector<float> found;
    for (int32_t row = 0; row < rows; ++row)
        for (int32_t col = 0; col < cols; ++col) found.push_back(value(rank, row, col));
    return found;
}

bool sum(CollectiveGroup& group, octavo::ThreadPool& pool, int32_t rows, int32_t cols, int* wrong) {
    std::vector<float> x = values(group.rank(), rows, cols), expected(x.size(), 0.0f);
    for (int32_t rank = 0; rank < group.size(); ++rank) {
        const std::vector<float> part = values(rank, rows, cols);
        for (size_t i = 0; i < x.size(); ++i) expected[i] += part[i];
    }
    const octavo::View view{x.data(), rows, cols};
    if (!exchange(group, pool, "all_reduce", view, view)) return false;
    *wrong += x != expected;
    return true;
}

// Each rank has one column more than the one before it.
bool gather(CollectiveGroup& group, octavo::ThreadPool& pool, int32_t rows, int32_t cols, int* wrong) {
    std::vector<float> x = values(group.rank(), rows, cols + group.rank()), expected;
    for (int32_t row = 0; row < rows; ++row)
        for (int32_t rank = 0; rank < group.size(); ++rank)
            for (int32_t col = 0; col < cols + rank; ++col) expected.push_back(value(rank, row, col));
    std::vector<float> out(expected.size());
    const octavo::View from{x.data(), rows, cols + group.rank()};
    const octavo::View to{out.data(), rows, static_cast<int32_t>(out.size()) / rows};
    if (!exchange(group, pool, "all_gather", from, to)) return false;
    *wrong += out != expected;
    return true;
}

// The same exchanges on every rank, one of which may come late. Stops once a rank is gone.
int play(CollectiveGroup& group, octavo::ThreadPool& pool, int rounds, std::atomic<int>* played = nullptr) {
    std::mt19937 random(7);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    int wrong = 0;
    for (int round = 0; round < rounds; ++round) {
        const int32_t rows = 1 + below(MAX_ROWS), cols = 1 + below(below(4) ? 100 : MAX_COLS);
        const bool is_sum = below(2), is_late = below(group.size()) == group.rank();
        if (below(4) == 0 && is_late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (!(is_sum ? sum : gather)(group, pool, rows, cols, &wrong)) break;
        if (played) ++*played;
    }
    return wrong;
}

// Runs a function on all ranks, each on a thread. The sum of the results.
template <typename F>
int on_ranks(int32_t size, const F& run) {
    std::atomic<int> total{0};
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < size; ++rank) threads.emplace_back([&, rank] { total += run(rank); });
    for (std::thread& thread : threads) thread.join();
    return total;
}

int stress(const Setting& setting, int rounds) {
    return on_ranks(setting.size, [&](int32_t rank) {
        CollectiveGroup group(options_of(setting, rank));
        octavo::ThreadPool pool(options_of(setting));
        std::atomic<bool> is_done{false};
        std::thread watcher([&] {
            for (; !is_done; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
                if (group.is_waiting() && !group.error().empty()) return;
        });
        const int wrong = play(group, pool, rounds);
        is_done = true;
        watcher.join();
        return wrong + !group.error().empty();
    });
}

// Rank 1 gives up at a moment of another thread, or ends: the exchanges of all others end, too.
int stress_end(const Setting& setting, bool gives_up) {
    constexpr int ENDLESS = 1 << 30, BEFORE = 10;
    std::atomic<int> played{0};
    return on_ranks(setting.size, [&](int32_t rank) {
        CollectiveGroup group(options_of(setting, rank));
        octavo::ThreadPool pool(options_of(setting));
        if (rank != 1) return play(group, pool, ENDLESS) + group.error().empty();
        if (!gives_up) return play(group, pool, BEFORE);
        std::thread other([&] {
            while (played < BEFORE) std::this_thread::yield();
            group.fail("it gives up");
        });
        const int wrong = play(group, pool, ENDLESS, &played);
        other.join();
        return wrong + (group.error() != "it gives up");
    });
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
    int failures = 0;
    for (const int spin_us : {0, 200})
        for (const int workers : {1, 2})
            for (const int32_t size : {1, 2, 3, 4}) {
                const Setting setting{size, workers, spin_us};
                failures += stress(setting, rounds);
                if (size > 1) failures += stress_end(setting, true) + stress_end(setting, false);
            }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
