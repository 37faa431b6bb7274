// Reads mapped weights ahead of the kernels and releases their pages after use.
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

// For a model larger than memory: weights that do not stay in memory are streamed in the order of the records. A
// separate thread asks the system for the next weights and releases used ones, so that the system need not guess which
// pages to evict. This is only advice: the kernels compute the same without it.
class WeightStream {
  public:
    // A matrix in a mapped file, and the record that reads it.
    struct Item {
        size_t record;
        char* data;
        size_t bytes;
    };

    // items: in the order of their records. ahead_bytes: how many bytes of items to read ahead, at least one item.
    // num_records: those of the program.
    WeightStream(std::vector<Item> items, size_t num_records, size_t ahead_bytes);
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    // Begins a step. Callers must have exclusive access to the program.
    void begin_step();
    // Reports that a worker is about to run a record of the current step. All workers call it; the first one counts.
    void reached(size_t record);

  private:
    void run();
    // Moves the window to the first item from `record` on. Returns false if it stopped because the position changed.
    bool advance(uint64_t position);
    void release(const Item& item);

    std::vector<Item> items_;
    std::vector<char> is_in_memory_;  // by item, as far as this thread knows
    const uint64_t lap_;              // positions per step
    const size_t ahead_bytes_;
    size_t first_ = 0;  // item at the last position
    uint64_t step_ = 0;
    std::atomic<uint64_t> position_{0};  // step * lap + record
    std::mutex mutex_;
    std::unique_ptr<std::condition_variable> moved_;
    bool stops_ = false;
    const int process_;  // a forked process lacks the thread
    std::thread thread_;
};

}  // namespace octavo
