// A group of ranks on one machine: processes that add and gather values through shared memory.
//
// Each rank has its own segment, which the other ranks map for reading: a page of signals and a buffer in two halves.
// An exchange copies a piece of the rank's values into one half, raises the rank's counter, waits for the counters of
// all other ranks, and reads what they have written. It reads in the order of the ranks, so that every run gives the
// same bits on every rank. When a rank reuses a half, it has passed the barrier of the exchange in between, and so have
// all ranks that read that half. Small values take one phase: every rank adds up everything. Large values take two:
// each rank adds up its share, then the shares are gathered, so that each element is added once.
//
// One thread of each rank raises its heartbeat ten times a second. A waiting rank gives up if another rank's heartbeat
// stops, if another rank has given up, or when a deadline passes. After that every exchange fails at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange.h"
#include "platform/sharing.h"

namespace octavo {

struct GroupOptions {
    std::string name;  // prefix of the segment names: letters, digits, '-' and '_'
    int32_t rank = 0;
    int32_t size = 1;
    size_t buffer_bytes = size_t{4} << 20;  // size of one half
    int32_t join_ms = 60000;                // until all ranks have joined
    int32_t silence_ms = 3000;              // a rank without a heartbeat for this long is dead or stopped
    int32_t deadline_ms = 300000;           // for one wait on a rank that is still alive
    int32_t spin_us = 200;                  // spinning time before a wait sleeps
    int32_t numa_node = -1;                 // NUMA node for this rank's memory; -1: wherever it is first touched
    // Called while ranks join. Returns a reason to stop waiting (such as that a rank has exited), or an empty string.
    std::function<std::string()> given_up = [] { return std::string(); };
};

// One rank's end of a group. Only one exchange runs at a time, called by one thread or by all workers of one pool.
class CollectiveGroup {
  public:
    // Creates this rank's segment, waits for the segments of the other ranks, and then unlinks them all, so that none
    // is left behind. Throws std::runtime_error naming a rank that did not join, and std::invalid_argument.
    explicit CollectiveGroup(const GroupOptions& options);
    ~CollectiveGroup();
    CollectiveGroup(const CollectiveGroup&) = delete;
    CollectiveGroup& operator=(const CollectiveGroup&) = delete;

    int32_t rank() const { return options_.rank; }
    int32_t size() const { return options_.size; }

    // The interface for kernels.
    Exchange* exchange() { return &exchange_; }

    // Tells the other ranks that this one has left the group, so that their exchanges fail. Safe from any thread.
    void fail(const std::string& reason);
    // The errno that explains why the segment is not on the wanted NUMA node; 0 if it is, or if none was wanted.
    int placement_error() const { return placement_error_; }
    // Returns why exchanges fail; empty if they do not.
    std::string error() const;
    // True while an exchange has been waiting for another rank for more than a moment. Safe from any thread.
    bool is_waiting() const { return is_waiting_.load(std::memory_order_relaxed); }

  private:
    struct Segment;
    void open_peers();
    void wait_to_join(int64_t end, int32_t rank) const;
    bool wait(uint32_t target);
    bool wait_for(int32_t peer, uint32_t target);
    void beat();
    void close();

    GroupOptions options_;
    Exchange exchange_;
    std::vector<platform::SharedSegment> memory_;  // by rank
    std::vector<Segment*> segments_;               // by rank; null until it has joined
    std::vector<char*> halves_;                    // [2, size]
    size_t segment_bytes_ = 0;
    int placement_error_ = 0;
    std::atomic<bool> stopping_{false}, is_waiting_{false};
    mutable std::mutex mutex_;
    std::string error_;
    std::thread heart_;
};

}  // namespace octavo
