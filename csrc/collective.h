// A group of ranks on one machine: processes that add and gather values through shared memory.
//
// Each rank has a segment of its own, which the others map for reading: a page of signals and a buffer in two halves.
// An exchange copies a piece of the rank's values into a half, raises the rank's counter, waits for the counters of all
// others, and reads what they have written, in the order of the ranks, so that every run gives the same bits on every
// rank. A rank that writes a half again has passed the barrier of the exchange between, and so has everyone who read
// it. Small values take one phase: every rank adds up everything. Large ones take two: a rank adds up its share, and
// the shares are gathered, so that each element is added once.
//
// A thread of each rank raises its heartbeat ten times a second. A rank that waits gives up if another one's stops,
// if that rank has given up, or at a deadline. After that every exchange fails at once.
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
    std::string name;  // of the segments: letters, digits, '-' and '_'
    int32_t rank = 0;
    int32_t size = 1;
    size_t buffer_bytes = size_t{4} << 20;  // of a half
    int32_t join_ms = 60000;                // for all ranks to come
    int32_t silence_ms = 3000;              // without a heartbeat: the rank is dead or stopped
    int32_t deadline_ms = 300000;           // of one wait for a rank that lives
    int32_t spin_us = 200;                  // before a wait sleeps
    int32_t numa_node = -1;                 // for the memory of this rank; -1: where it is first touched
    // Asked while ranks come: a reason to wait no longer, such as the end of one; empty: there is none.
    std::function<std::string()> given_up = [] { return std::string(); };
};

// A rank's end of a group. An exchange is one at a time, by one thread or all workers of one pool.
class CollectiveGroup {
  public:
    // Makes this rank's segment, waits for those of the others, and takes their names away again: whatever happens
    // later, none is left. Throws std::runtime_error naming the rank that did not come, and std::invalid_argument.
    explicit CollectiveGroup(const GroupOptions& options);
    ~CollectiveGroup();
    CollectiveGroup(const CollectiveGroup&) = delete;
    CollectiveGroup& operator=(const CollectiveGroup&) = delete;

    int32_t rank() const { return options_.rank; }
    int32_t size() const { return options_.size; }

    // What kernels call.
    Exchange* exchange() { return &exchange_; }

    // Tells the others that this rank takes part no more: their exchanges fail. Safe from any thread.
    void fail(const std::string& reason);
    // Why the segment is not on the wanted NUMA node, as an errno; 0: it is, or none was wanted.
    int placement_error() const { return placement_error_; }
    // Why exchanges fail; empty: they do not.
    std::string error() const;
    // True while an exchange waits for another rank, apart from the first moments. Safe from any thread.
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
    std::vector<platform::SharedSegment> memory_;  // of each rank
    std::vector<Segment*> segments_;               // by rank, once it has come
    std::vector<char*> halves_;                    // [2, size]
    size_t segment_bytes_ = 0;
    int placement_error_ = 0;
    std::atomic<bool> stopping_{false}, is_waiting_{false};
    mutable std::mutex mutex_;
    std::string error_;
    std::thread heart_;
};

}  // namespace octavo
