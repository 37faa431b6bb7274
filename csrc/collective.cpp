#include "collective.h"

#include <chrono>
#include <new>
#include <stdexcept>

#include "pause.h"
#include "platform/threads.h"
#include "platform/wait.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t MAGIC = 0x4f435456;  // "OCTV"
constexpr int32_t MAX_RANKS = Exchange::MAX_RANKS;
constexpr int BEAT_MS = 100, NAP_MS = 20;
constexpr size_t PAGE = 4096;

int64_t now_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(NAP_MS)); }

std::string name_of(const GroupOptions& options, int32_t rank) {
    return "octavo-" + options.name + "-" + std::to_string(rank);
}

}  // namespace

// The first page of a segment. Each counter is on its own cache line.
struct CollectiveGroup::Segment {
    std::atomic<uint32_t> magic;
    int32_t size;
    uint64_t buffer_bytes;
    std::atomic<uint32_t> joined, failed;
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> heartbeat;
};

CollectiveGroup::CollectiveGroup(const GroupOptions& options) : options_(options), exchange_{} {
    if (options.size < 1 || options.size > MAX_RANKS || options.rank < 0 || options.rank >= options.size)
        throw std::invalid_argument("rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
                                    ": a group has 1 to " + std::to_string(MAX_RANKS) + " ranks, counted from 0");
    for (const char c : options.name)
        if (!isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '_')
            throw std::invalid_argument("a group name may have only letters, digits, '-' and '_', not: " +
                                        options.name);
    const size_t half = (options.buffer_bytes + Exchange::HEADER_BYTES + PAGE - 1) / PAGE * PAGE;
    segment_bytes_ = PAGE + 2 * half;
    memory_.resize(options.size);
    segments_.assign(options.size, nullptr);
    try {
        open_peers();
    } catch (...) {
        close();
        throw;
    }
    for (int32_t at = 0; at < 2; ++at)
        for (Segment* const segment : segments_) halves_.push_back(reinterpret_cast<char*>(segment) + PAGE + at * half);
    exchange_.rank = options.rank;
    exchange_.size = options.size;
    exchange_.halves = halves_.data();
    exchange_.bytes = half - Exchange::HEADER_BYTES;
    exchange_.met = true;
    exchange_.group = this;
    exchange_.barrier = [](Exchange& e) { return static_cast<CollectiveGroup*>(e.group)->wait(++e.turn); };
}

// Takes one nap. Throws if the rank is too late, or if the caller has given up on it.
void CollectiveGroup::wait_to_join(int64_t end, int32_t rank) const {
    const std::string reason = options_.given_up();
    if (!reason.empty()) throw std::runtime_error(reason);
    if (now_ms() > end)
        throw std::runtime_error("rank " + std::to_string(rank) + " did not join the group within " +
                                 std::to_string(options_.join_ms / 1000) + " s");
    nap();
}

// Creates this rank's segment and maps the segments of the other ranks once they exist.
void CollectiveGroup::open_peers() {
    const int64_t end = now_ms() + options_.join_ms;
    for (int32_t i = 0; i < options_.size; ++i) {
        const int32_t rank = (options_.rank + i) % options_.size;  // its own first
        const bool own = i == 0;
        for (;; wait_to_join(end, rank)) {
            if (own)
                memory_[rank] = platform::SharedSegment::create(name_of(options_, rank), segment_bytes_,
                                                                options_.numa_node, &placement_error_);
            else
                memory_[rank] = platform::SharedSegment::open(name_of(options_, rank), segment_bytes_);
            Segment* const segment = static_cast<Segment*>(memory_[rank].data());
            if (own) {
                segments_[rank] = segment;
                segment->size = options_.size;
                segment->buffer_bytes = options_.buffer_bytes;
                segment->magic.store(MAGIC, std::memory_order_release);
                heart_ = std::thread([this] { beat(); });
            }
            if (segment && segment->magic.load(std::memory_order_acquire) == MAGIC) {
                segments_[rank] = segment;
                break;
            }
        }
        if (segments_[rank]->size != options_.size || segments_[rank]->buffer_bytes != options_.buffer_bytes)
            throw std::runtime_error("rank " + std::to_string(rank) + " uses a different group size or buffer size");
    }
    segments_[options_.rank]->joined.store(1, std::memory_order_release);
    for (int32_t rank = 0; rank < options_.size; ++rank)
        while (!segments_[rank]->joined.load(std::memory_order_acquire)) wait_to_join(end, rank);
    memory_[options_.rank].remove_name();
}

CollectiveGroup::~CollectiveGroup() { close(); }

void CollectiveGroup::close() {
    stopping_.store(true);
    if (heart_.joinable()) heart_.join();
    if (segments_[options_.rank])
        segments_[options_.rank]->failed.store(1);  // ranks that still wait for this one can stop
    segments_.assign(options_.size, nullptr);
    memory_.clear();
}

void CollectiveGroup::beat() {
    const platform::BlockedSignals blocked;
    while (!stopping_.load(std::memory_order_relaxed)) {
        segments_[options_.rank]->heartbeat.fetch_add(1, std::memory_order_relaxed);
        std::this_thread::sleep_for(std::chrono::milliseconds(BEAT_MS));
    }
}

void CollectiveGroup::fail(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = reason;
    if (segments_[options_.rank]) segments_[options_.rank]->failed.store(1, std::memory_order_release);
}

std::string CollectiveGroup::error() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

// Returns true once all ranks have reached barrier number `target`.
bool CollectiveGroup::wait(uint32_t target) {
    Segment& own = *segments_[options_.rank];
    if (own.failed.load(std::memory_order_acquire)) return false;
    own.arrived.store(target);
    if (own.sleepers.load() > 0) platform::wake_sharers(own.arrived);
    bool all_came = true;
    for (int32_t i = 1; i < options_.size && all_came; ++i)
        all_came = wait_for((options_.rank + i) % options_.size, target);
    is_waiting_.store(false, std::memory_order_relaxed);
    return all_came;
}

bool CollectiveGroup::wait_for(int32_t peer, uint32_t target) {
    Segment& other = *segments_[peer];
    const auto has_come = [&] { return static_cast<int32_t>(other.arrived.load() - target) >= 0; };
    const auto spin_end = Clock::now() + std::chrono::microseconds(options_.spin_us);
    do {
        for (int i = 0; i < 64; ++i) {
            if (has_come()) return true;
            pause_cpu();
        }
    } while (Clock::now() < spin_end);
    is_waiting_.store(true, std::memory_order_relaxed);
    const int64_t start = now_ms();
    int64_t heard = start;
    uint32_t beat = other.heartbeat.load(std::memory_order_relaxed);
    while (!has_come()) {
        const uint32_t seen = other.arrived.load();
        other.sleepers.fetch_add(1);
        if (!has_come()) platform::sleep_while_shared(other.arrived, seen, NAP_MS);
        other.sleepers.fetch_sub(1);
        const int64_t now = now_ms();
        const uint32_t newest = other.heartbeat.load(std::memory_order_relaxed);
        if (newest != beat) heard = now;
        beat = newest;
        const std::string who = "rank " + std::to_string(peer) + " of " + std::to_string(options_.size);
        if (has_come()) return true;
        if (segments_[options_.rank]->failed.load(std::memory_order_acquire))
            return false;
        else if (other.failed.load(std::memory_order_acquire))
            fail(who + " has given up or exited");
        else if (now - heard > options_.silence_ms)
            fail(who + " has died or was stopped: no sign of life for " + std::to_string(options_.silence_ms) + " ms");
        else if (now - start > options_.deadline_ms)
            fail(who + " is alive but did not reach the exchange within " +
                 std::to_string(options_.deadline_ms / 1000) + " s");
        else
            continue;
        return false;
    }
    return true;
}

}  // namespace octavo
