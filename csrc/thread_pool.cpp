#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pause.h"
#include "platform/threads.h"
#include "platform/wait.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// Calls `done` with pauses until it returns true or the time is up.
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

constexpr int FAN_IN = 4;  // workers, or nodes, that arrive at one node

int nodes_above(int members) { return (members + FAN_IN - 1) / FAN_IN; }

int nodes_of_tree(int members) {
    const int nodes = nodes_above(members);
    return nodes == 1 ? 1 : nodes + nodes_of_tree(nodes);
}

}  // namespace

ThreadPool::ThreadPool(const PoolOptions& options)
    : options_(options),
      pid_(platform::process_id()),
      arrivals_(new Arrivals[nodes_of_tree(std::max(options.count, 1))]),
      workers_(new PaddedWorker[std::max(options.count, 1)]) {
    options_.count = std::max(options.count, 1);
    for (int i = 0; i < options_.count; ++i) {
        Worker& worker = workers_[i].worker;
        worker.index = i;
        worker.count = options_.count;
        worker.pool = this;
        worker.taken = &taken_;
        workers_[i].spin = Spin(options_.barrier_spin_us);
        worker.barrier_fn = [](Worker& w) { static_cast<ThreadPool*>(w.pool)->barrier(w.index, Place::inside); };
    }
    const platform::BlockedSignals blocked;
    try {
        for (int i = 0; i + 1 < options_.count; ++i) threads_.emplace_back(&ThreadPool::work, this, i);
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (platform::process_id() != pid_) {
        // The threads exist only in the parent. Their handles may by now belong to threads of this process, so leak
        // them instead of joining or detaching them.
        new std::vector<std::thread>(std::move(threads_));
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
    if (platform::process_id() != pid_)
        throw std::runtime_error(
            "the model was loaded before a fork and its threads stayed in the parent process; "
            "load it in the process that uses it, or start processes with the spawn method");
}

void ThreadPool::begin(const Queued& next) {
    job_ = next.job;
    context_ = next.context;
    members_ = next.on_all ? options_.count : std::max(options_.count - 1, 1);
    position_ = 0;
    const uint32_t number = job_number_.value.load(std::memory_order_relaxed) + 1;
    waiter_.store(of_job(number, next.on_all ? expected : absent), std::memory_order_release);
    advance(job_number_);
}

uint32_t ThreadPool::start(Job job, void* context, bool on_all) {
    check_process();
    const std::lock_guard<std::mutex> guard(queue_mutex_);
    const uint32_t number = last_job() + 1;
    const bool is_idle = is_done(last_job());
    last_job_.store(number, std::memory_order_relaxed);
    if (is_idle)
        begin({job, context, on_all});
    else
        queued_ = Queued{job, context, on_all};
    return number;
}

// Called by the last worker at the end of a job.
void ThreadPool::end() {
    const std::lock_guard<std::mutex> guard(queue_mutex_);
    if (queued_) {
        begin(*queued_);
        queued_.reset();
    }
    advance(finished_);  // last, because whoever sees it may join the next job
}

bool ThreadPool::is_done(uint32_t number) const {
    return static_cast<int32_t>(finished_.value.load(std::memory_order_acquire) - number) >= 0;
}

void ThreadPool::wait(uint32_t number) {
    if (is_done(number)) return;
    if (!is_done(number - 1)) wait(number - 1);
    check_process();
    if (join(number)) {
        if (options_.tiles) load_tile_configuration();
        take_part(options_.count - 1, position_);
        if (options_.tiles) release_tiles();
    }
    // No spinning, because the workers need the processors.
    Spin none;
    for (;;) {
        const uint32_t finished = finished_.value.load(std::memory_order_acquire);
        if (static_cast<int32_t>(finished - number) >= 0) return;
        check_process();
        wait_for_change(finished_, finished, none, false);
    }
}

// Makes the calling thread a worker of the job; false if another thread is, or if the job ended first.
bool ThreadPool::join(uint32_t number) {
    uint32_t state = of_job(number, expected);
    if (waiter_.compare_exchange_strong(state, of_job(number, admitted), std::memory_order_seq_cst)) return true;
    state = of_job(number, absent);
    return waiter_.compare_exchange_strong(state, of_job(number, asking), std::memory_order_seq_cst) &&
           wait_for_boundary(number);
}

// Returns false if the job ended first. A pool of one worker has nobody to wait for.
bool ThreadPool::wait_for_boundary(uint32_t number) {
    if (threads_.empty()) return true;
    Spin spin(options_.barrier_spin_us);
    for (;;) {
        const uint32_t generation = generation_.value.load(std::memory_order_acquire);
        const uint32_t waiter = waiter_.load(std::memory_order_acquire);
        if (waiter == of_job(number, admitted)) {
            // Otherwise the end of the barrier that admitted it could be mistaken for the end of its first one.
            wait_for_change(generation_, joined_at_, spin, false);
            return true;
        }
        if (waiter != of_job(number, asking)) return false;
        wait_for_change(generation_, generation, spin, false);
    }
}

void ThreadPool::work(int index) {
    platform::name_thread("octavo-" + std::to_string(index));
    if (options_.tiles) load_tile_configuration();
    Spin idle(options_.idle_spin_us);
    for (uint32_t seen = 0;; ++seen) {
        wait_for_change(job_number_, seen, idle, options_.tiles);
        if (stopping_) break;
        take_part(index, 0);
    }
    if (options_.tiles) release_tiles();
}

void ThreadPool::take_part(int index, size_t position) {
    Worker& worker = workers_[index].worker;
    worker.count = members_;
    job_(context_, worker, position);
    barrier(index, Place::end);
}

void ThreadPool::boundary(Worker& worker, size_t position) {
    barrier(worker.index, Place::between, position);
    worker.count = members_;
}

// The last worker to arrive at a node moves up. Nobody returns to a node before the barrier is over.
bool ThreadPool::is_last_to_arrive(int index, int members) {
    Arrivals* level = arrivals_.get();
    for (int place = index;;) {
        const int node = place / FAN_IN;
        const uint32_t expected = static_cast<uint32_t>(std::min(members - node * FAN_IN, FAN_IN));
        if (level[node].count.fetch_add(1, std::memory_order_acq_rel) + 1 < expected) return false;
        level[node].count.store(0, std::memory_order_relaxed);
        if (members <= FAN_IN) return true;
        members = nodes_above(members);
        level += members;
        place = node;
    }
}

void ThreadPool::barrier(int index, Place place, size_t position) {
    const uint32_t generation = generation_.value.load(std::memory_order_relaxed);
    if (!is_last_to_arrive(index, members_)) {
        // After the end, another thread may be this worker in the next job.
        if (place != Place::end) wait_for_change(generation_, generation, workers_[index].spin, false);
        return;
    }
    taken_ = 0;
    const uint32_t number = job_number_.value.load(std::memory_order_relaxed);
    if (place == Place::between && waiter_.load(std::memory_order_seq_cst) == of_job(number, asking)) {
        position_ = position;
        joined_at_ = generation;
        members_ = options_.count;
        waiter_.store(of_job(number, admitted), std::memory_order_release);
    }
    if (place == Place::end) waiter_.store(of_job(number, too_late), std::memory_order_seq_cst);
    advance(generation_);
    if (place == Place::end) end();
}

void ThreadPool::advance(Signal& signal) {
    // Sequentially consistent with the sleeper's increment and load, so that one of the two sees the other.
    signal.value.fetch_add(1, std::memory_order_seq_cst);
    if (signal.sleepers.load(std::memory_order_seq_cst) > 0) platform::wake_sleepers(signal.value);
}

void ThreadPool::wait_for_change(Signal& signal, uint32_t old, Spin& spin, bool tiles) {
    const auto start = Clock::now();
    if (!spin_until(start + spin.now, [&] { return signal.value.load(std::memory_order_acquire) != old; })) {
        // No sched_yield: on a busy machine it waits for a whole round of other threads' time slices, while the
        // scheduler immediately runs a thread that wakes up.
        if (tiles) release_tiles();
        signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (signal.value.load(std::memory_order_seq_cst) == old) platform::sleep_while(signal.value, old);
        signal.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (tiles) load_tile_configuration();
    }
    // Spinning pays off while waits are short. On a busy machine they are long, and a spinning thread takes time that
    // other threads need, so spin less and sleep sooner.
    const bool is_short = Clock::now() - start <= spin.most;
    spin.now = is_short ? std::min(2 * spin.now + spin.most / 16, spin.most) : std::max(spin.now / 2, spin.most / 16);
}

}  // namespace octavo
