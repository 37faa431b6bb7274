// Persistent workers that run one function together, with a barrier between its parts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace octavo {

struct PoolOptions {
    int count = 1;               // workers; the calling thread is none of them
    int barrier_spin_us = 50;    // how long a worker spins inside a run before it sleeps
    int idle_spin_us = 300;      // how long it spins between runs before it sleeps
    int handover_spin_us = 300;  // the same for worker 0, which may have to share a processor with the caller
    bool tiles = false;          // the kernels use AMX tiles
};

class ThreadPool {
  public:
    using Job = void (*)(void* context, Worker& worker);

    // Throws std::system_error if threads cannot be started.
    explicit ThreadPool(const PoolOptions& options);
    ~ThreadPool();  // waits for a job that is running
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int count() const { return options_.count; }

    // Gives every worker private scratch of at least this size, aligned to 64 bytes. Not during a run.
    void reserve_scratch(size_t bytes_per_worker);

    // Starts job(context, worker) on all workers and returns its number at once. `context` must live until the job is
    // done. One job at a time: the one before must be done. Throws std::runtime_error in a process that was forked
    // after the pool was made: threads do not survive a fork.
    uint32_t start(Job job, void* context);

    // Returns when the job of that number is done. Any thread may wait, for any job. Throws like `start` if the
    // job was running when the process was forked.
    void wait(uint32_t number);

    // True if `wait` would return at once.
    bool is_done(uint32_t number) const;

    // Starts a job and waits for it.
    void run(Job job, void* context) { wait(start(job, context)); }

    // The number of the job that was started last.
    uint32_t last_job() const { return job_number_.value.load(std::memory_order_relaxed); }

  private:
    // On its own cache line: neighbours are written by other threads.
    struct alignas(64) Signal {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
    };
    // How long one thread spins at one kind of wait: now, and at most.
    struct Spin {
        explicit Spin(int most_us = 0) : now(std::chrono::microseconds(most_us)), most(now) {}
        std::chrono::nanoseconds now, most;
    };
    struct alignas(64) PaddedWorker {
        Worker worker{};
        Spin spin;
        Memory scratch;
    };

    void check_process() const;
    void work(int index);
    void stop();
    void barrier(int index);
    static void wait_for_change(Signal& signal, uint32_t old, Spin& spin, bool tiles);
    static void advance(Signal& signal);

    PoolOptions options_;
    int pid_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    Signal job_number_;  // jobs started
    Signal finished_;    // jobs done
    Signal generation_;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) int64_t taken_ = 0;  // of Worker::take
    std::unique_ptr<PaddedWorker[]> workers_;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
