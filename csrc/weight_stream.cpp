#include "weight_stream.h"

#include <algorithm>
#include <utility>

#include "platform/pages.h"
#include "platform/threads.h"

namespace octavo {

WeightStream::WeightStream(std::vector<Item> items, size_t num_records, size_t ahead_bytes)
    : items_(std::move(items)),
      is_in_memory_(items_.size(), 1),
      lap_(num_records + 1),
      ahead_bytes_(ahead_bytes),
      moved_(new std::condition_variable),
      process_(platform::process_id()) {
    thread_ = std::thread([this] { run(); });
}

WeightStream::~WeightStream() {
    if (process_ != platform::process_id()) {
        // As in ~ThreadPool: destroying the condition would wait for a thread that does not exist here.
        moved_.release();
        new std::thread(std::move(thread_));
        return;
    }
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        stops_ = true;
    }
    moved_->notify_one();
    thread_.join();
}

void WeightStream::begin_step() {
    ++step_;
    reached(0);
}

void WeightStream::reached(size_t record) {
    const uint64_t position = step_ * lap_ + record;
    uint64_t seen = position_.load(std::memory_order_relaxed);
    while (seen < position && !position_.compare_exchange_weak(seen, position)) {
    }
    if (seen >= position) return;
    {
        const std::lock_guard<std::mutex> guard(mutex_);  // the thread is either checking or already waiting
    }
    moved_->notify_one();
}

void WeightStream::run() {
    uint64_t done = UINT64_MAX;  // the first step does not wait for its first weights
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            moved_->wait(lock, [&] { return stops_ || position_.load() != done; });
            if (stops_) return;
        }
        const uint64_t position = position_.load();
        if (advance(position)) done = position;
    }
}

bool WeightStream::advance(uint64_t position) {
    const size_t count = items_.size(), record = position % lap_;
    const auto next =
        std::find_if(items_.begin(), items_.end(), [&](const Item& item) { return item.record >= record; });
    const size_t first = next == items_.end() ? 0 : static_cast<size_t>(next - items_.begin());
    // The kernels have read everything before this item, whether or not it was read ahead.
    for (; first_ != first; first_ = (first_ + 1) % count) is_in_memory_[first_] = 1;
    size_t end = 0;  // end of the window, in items after the first; may extend into the next step
    for (size_t bytes = 0; end < count && (end == 0 || bytes < ahead_bytes_); ++end)
        bytes += items_[(first + end) % count].bytes;
    for (size_t i = end; i < count; ++i) {
        const size_t item = (first + i) % count;
        if (std::exchange(is_in_memory_[item], 0)) release(items_[item]);
    }
    for (size_t i = 0; i < end; ++i) {
        const size_t item = (first + i) % count;
        if (std::exchange(is_in_memory_[item], 1)) continue;
        platform::fetch_pages(items_[item].data, items_[item].bytes);
        if (position_.load() != position) return false;
    }
    return true;
}

void WeightStream::release(const Item& item) {
    const uintptr_t page = platform::page_bytes(), at = reinterpret_cast<uintptr_t>(item.data);
    const uintptr_t begin = (at + page - 1) / page * page, end = (at + item.bytes) / page * page;
    if (begin < end) platform::evict_pages(reinterpret_cast<void*>(begin), end - begin);
}

}  // namespace octavo
