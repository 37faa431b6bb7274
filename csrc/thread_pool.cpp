#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

#include "isa.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");  // about as long as the pause of x86; `yield` does nothing on most cores
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Signals belong to the program's own threads: Python handles Ctrl-C there.
class BlockedSignals {
  public:
    BlockedSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

  private:
    sigset_t previous_;
};

// Calls `done` with pauses until it is true or the time has come.
template <typename Done>
bool spin_until(Clock::time_point end, Done done) {
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            pause_cpu();
        }
    } while (Clock::now() < end);
    return false;
}

}  // namespace

ThreadPool::ThreadPool(const PoolOptions& options)
    : options_(options), pid_(getpid()), workers_(new PaddedWorker[std::max(options.count, 1)]) {
    options_.count = std::max(options.count, 1);
    for (int i = 0; i < options_.count; ++i) {
        Worker& worker = workers_[i].worker;
        worker.index = i;
        worker.count = options_.count;
        worker.pool = this;
        worker.taken = &taken_;
        workers_[i].spin = Spin(options_.barrier_spin_us);
        worker.barrier_fn = [](Worker& w) { static_cast<ThreadPool*>(w.pool)->barrier(w.index); };
    }
    const BlockedSignals blocked;
    try {
        for (int i = 0; i < options_.count; ++i) threads_.emplace_back(&ThreadPool::work, this, i);
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() != pid_) {  // the threads stayed in the parent process: nothing to stop or to join
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    wait(last_job());
    stop();
}

void ThreadPool::stop() {
    stopping_ = true;
    advance(job_number_);
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::reserve_scratch(size_t bytes_per_worker) {
    for (int i = 0; i < options_.count; ++i) {
        PaddedWorker& padded = workers_[i];
        if (padded.scratch.size() >= bytes_per_worker) continue;
        padded.scratch = Memory(bytes_per_worker);
        padded.worker.scratch = padded.scratch.data();
        padded.worker.scratch_bytes = bytes_per_worker;
    }
}

void ThreadPool::check_process() const {
    if (getpid() != pid_)
        throw std::runtime_error(
            "the model was loaded before a fork and its threads stayed in the parent process; "
            "load it in the process that uses it, or start processes with the spawn method");
}

uint32_t ThreadPool::start(Job job, void* context) {
    check_process();
    job_ = job;
    context_ = context;
    advance(job_number_);
    return last_job();
}

bool ThreadPool::is_done(uint32_t number) const {
    return static_cast<int32_t>(finished_.value.load(std::memory_order_acquire) - number) >= 0;
}

void ThreadPool::wait(uint32_t number) {
    // No spinning: if the workers have all processors, a caller that spins takes the time of one of them.
    Spin none;
    for (;;) {
        const uint32_t finished = finished_.value.load(std::memory_order_acquire);
        if (static_cast<int32_t>(finished - number) >= 0) return;
        check_process();
        wait_for_change(finished_, finished, none, false);
    }
}

void ThreadPool::work(int index) {
    pthread_setname_np(pthread_self(), ("octavo-" + std::to_string(index)).c_str());
    if (options_.tiles) load_tile_configuration();
    Spin idle(index == 0 ? options_.handover_spin_us : options_.idle_spin_us);
    for (uint32_t seen = 0;; ++seen) {
        wait_for_change(job_number_, seen, idle, options_.tiles);
        if (stopping_) break;
        job_(context_, workers_[index].worker);
        barrier(index);
        if (index == 0) advance(finished_);
    }
    if (options_.tiles) release_tiles();
}

void ThreadPool::barrier(int index) {
    const uint32_t generation = generation_.value.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(options_.count)) {
        arrived_.store(0, std::memory_order_relaxed);
        taken_ = 0;
        advance(generation_);
    } else {
        wait_for_change(generation_, generation, workers_[index].spin, false);
    }
}

void ThreadPool::advance(Signal& signal) {
    // Sequentially consistent with the sleeper's increment and load: one of the two sees the other.
    signal.value.fetch_add(1, std::memory_order_seq_cst);
    if (signal.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(signal.value);
}

void ThreadPool::wait_for_change(Signal& signal, uint32_t old, Spin& spin, bool tiles) {
    const auto start = Clock::now();
    if (!spin_until(start + spin.now, [&] { return signal.value.load(std::memory_order_acquire) != old; })) {
        // No sched_yield: on a busy machine it costs a whole round of everybody else's time slices, while the
        // scheduler runs a thread that is woken from a sleep at once.
        if (tiles) release_tiles();
        signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (signal.value.load(std::memory_order_seq_cst) == old) futex_wait(signal.value, old);
        signal.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (tiles) load_tile_configuration();
    }
    // Spinning pays while waits are short. On a busy machine they are long, and a spinning thread takes the time
    // that the others need: then spin less and sleep sooner.
    const bool is_short = Clock::now() - start <= spin.most;
    spin.now = is_short ? std::min(2 * spin.now + spin.most / 16, spin.most) : std::max(spin.now / 2, spin.most / 16);
}

}  // namespace octavo
