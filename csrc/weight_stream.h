// Reads mapped weights ahead of the kernels and gives their pages back behind them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// A model larger than memory: the weights that do not stay in memory pass through it in the order of the records. A
// thread of its own asks the system for the next of them, and releases those that were used, so that the system need
// not guess which pages to evict. It only advises: without it the kernels compute the same.
class WeightStream {
  public:
    // A matrix in a mapped file, and the record that reads it.
    struct Item {
        size_t record;
        char* data;
        size_t bytes;
    };

    // items: in the order of their records. ahead_bytes: of the items that are read before they are needed, at least
    // one. num_records: of the program.
    WeightStream(std::vector<Item> items, size_t num_records, size_t ahead_bytes);
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    // A step begins; callers have the program to themselves.
    void begin_step();
    // A worker is about to run a record of the current step. Called by all workers; the first one counts.
    void reached(size_t record);

  private:
    void run();
    // Moves the window to the first item from `record` on. False: stopped because the position has changed.
    bool advance(uint64_t position);
    void release(const Item& item);

    std::vector<Item> items_;
    std::vector<char> is_in_memory_;  // of each item, as far as this thread knows
    const uint64_t lap_;              // positions of a step
    const size_t ahead_bytes_;
    size_t first_ = 0;  // item of the last position
    uint64_t step_ = 0;
    std::atomic<uint64_t> position_{0};  // step * lap + record
    std::mutex mutex_;
    std::unique_ptr<std::condition_variable> moved_;
    bool stops_ = false;
    const int process_;  // a fork has no such thread
    std::thread thread_;
};

}  // namespace octavo
