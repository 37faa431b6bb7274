// Persistent workers that run one function together, with a barrier between its parts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace octavo {

struct PoolOptions {
    int count = 1;             // workers, the last of which is the thread that waits for a job
    int barrier_spin_us = 50;  // how long a worker spins inside a job before it sleeps
    int idle_spin_us = 300;    // how long it spins between jobs before it sleeps
    bool tiles = false;        // the kernels use AMX tiles
};

// A job runs on `count` workers: the pool's threads and the thread that waits for the job. The pool's threads start
// without that thread, which joins at the next boundary of the job. A thread that has other work first therefore delays
// nobody, and no two threads share a processor. A job that is too short for a boundary starts on all workers instead.
class ThreadPool {
  public:
    // `position`: the boundary at which this worker joins; 0 at the start.
    using Job = void (*)(void* context, Worker& worker, size_t position);

    // Throws std::system_error if threads cannot be started.
    explicit ThreadPool(const PoolOptions& options);
    ~ThreadPool();  // waits for a running job
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int count() const { return options_.count; }

    // Gives every worker private scratch of at least this size, aligned to 64 bytes. Not during a job.
    void reserve_scratch(size_t bytes_per_worker);

    // Starts a job and returns its number at once. If another job is running, the new one starts as soon as that one
    // ends, without waiting for a caller. `context` must live until the job is done. `has_room` must be true. A pool of
    // one worker runs jobs in `wait`. Throws std::runtime_error in a process that was forked after the pool was
    // created, because threads do not survive a fork.
    // `on_all`: the waiting thread takes part from the start, so the job stops at its first barrier until `wait`.
    uint32_t start(Job job, void* context, bool on_all = false);

    // False while one job runs and another waits.
    bool has_room() const { return is_done(last_job() - 1); }

    // Joins the job with that number and the one before it, and returns when it is done. Any thread may wait for any
    // job; only one of several joins. Throws like `start` if the process was forked while the job was running.
    void wait(uint32_t number);

    // True if `wait` would return at once.
    bool is_done(uint32_t number) const;

    // Runs a job on all workers from its start.
    void run(Job job, void* context) { wait(start(job, context, true)); }

    // A barrier between two parts of a job. All workers of the job call it with the same `position` > 0, the next part.
    // The waiting thread may join here, which changes `worker.count`.
    void boundary(Worker& worker, size_t position);

    // Counts barriers, so it changes as long as jobs make progress.
    uint32_t progress() const { return generation_.value.load(std::memory_order_relaxed); }

    // The number of the most recent job.
    uint32_t last_job() const { return last_job_.load(std::memory_order_relaxed); }

  private:
    // On its own cache line, because other threads write its neighbours.
    struct alignas(64) Signal {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
    };
    // A node of the tree in which workers arrive at a barrier. Each level has a quarter of the nodes of the level
    // below, so at most four workers write to one cache line. Up to four workers share a single node.
    struct alignas(64) Arrivals {
        std::atomic<uint32_t> count{0};
    };
    // How long a thread spins in one kind of wait: currently, and at most.
    struct Spin {
        explicit Spin(int most_us = 0) : now(std::chrono::microseconds(most_us)), most(now) {}
        std::chrono::nanoseconds now, most;
    };
    struct alignas(64) PaddedWorker {
        Worker worker{};
        Spin spin;
        Memory scratch;
    };

    // The state of the thread that waits for the job: absent, expected from the start, asking to join, admitted, or too
    // late.
    enum Waiter : uint32_t { absent, expected, asking, admitted, too_late };
    // The value of `waiter_`. It includes the job, so that a latecomer cannot get into the next one.
    static uint32_t of_job(uint32_t number, Waiter waiter) { return number << 3 | waiter; }
    struct Queued {
        Job job;
        void* context;
        bool on_all;
    };
    // The place of a barrier: inside a part of the job, between two parts, or after the last.
    enum class Place { inside, between, end };

    void check_process() const;
    void begin(const Queued& next);
    void end();
    void work(int index);
    void take_part(int index, size_t position);
    bool join(uint32_t number);
    bool wait_for_boundary(uint32_t number);
    void stop();
    void barrier(int index, Place place, size_t position = 0);
    bool is_last_to_arrive(int index, int members);
    static void wait_for_change(Signal& signal, uint32_t old, Spin& spin, bool tiles);
    static void advance(Signal& signal);

    PoolOptions options_;
    int pid_;
    std::unique_ptr<Arrivals[]> arrivals_;  // all zero between barriers; lowest level first
    // State of the job, changed by the last worker that arrives at a barrier.
    Job job_ = nullptr;
    void* context_ = nullptr;
    int members_ = 0;  // participating workers
    // The boundary at which the waiting thread joined. Its generation is over once the other workers continue.
    size_t position_ = 0;
    uint32_t joined_at_ = 0;
    bool stopping_ = false;
    std::mutex queue_mutex_;
    std::optional<Queued> queued_;       // starts when the running job ends
    std::atomic<uint32_t> last_job_{0};  // jobs accepted, including a queued one
    Signal job_number_;                  // jobs started
    Signal finished_;                    // jobs done
    Signal generation_;                  // barriers passed
    alignas(64) std::atomic<uint32_t> waiter_{absent};
    alignas(64) int64_t taken_ = 0;  // for Worker::take
    std::unique_ptr<PaddedWorker[]> workers_;
    std::vector<std::thread> threads_;
};

}  // namespace octavo
