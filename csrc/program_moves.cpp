// Moves the contents of blocks and state slots in a step: to and from external memory, and between blocks or slots.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "program.h"

namespace octavo {
namespace {

void check_moved(const char* name, const BlockBytes& moved, size_t expected, int32_t limit) {
    if (moved.count > 0 && moved.block_bytes != expected)
        throw std::invalid_argument("data of " + std::string(name) + " has " + std::to_string(moved.block_bytes) +
                                    " bytes per block, must have " + std::to_string(expected));
    for (int32_t i = 0; i < moved.count; ++i)
        if (moved.block_ids[i] < 0 || moved.block_ids[i] >= limit)
            throw std::invalid_argument("block_ids of " + std::string(name) + ": " +
                                        std::to_string(moved.block_ids[i]) + " must be from 0 to " +
                                        std::to_string(limit - 1));
}

// Saves and then loads one part of each block: `bytes` per block of `data`, at `offset` in a row.
void move_part(char* data, size_t bytes, size_t offset, const BlockBytes& saves, const BlockBytes& loads) {
    for (int32_t n = 0; n < saves.count; ++n)
        std::memcpy(saves.data + n * saves.stride + offset, data + saves.block_ids[n] * bytes, bytes);
    for (int32_t n = 0; n < loads.count; ++n)
        std::memcpy(data + loads.block_ids[n] * bytes, loads.data + n * loads.stride + offset, bytes);
}

}  // namespace

// The size of a block in each cache: that of its largest layer.
std::vector<size_t> Program::block_bytes_of(int32_t block_size) const {
    std::vector<size_t> bytes(caches_.size());
    for (const auto& record : records_)
        if (record->spec.cache >= 0)
            bytes[record->spec.cache] =
                std::max(bytes[record->spec.cache], record->kernel->cache(record->args, block_size));
    return bytes;
}

void Program::check_moves(const PendingStep& pending) const {
    if (!pending.moves()) return;
    if (lender_) throw std::invalid_argument("a step cannot move blocks of a cache that belongs to another program");
    const StepLimits& limits = options_.limits;
    const std::vector<size_t> of_caches = block_bytes_of(limits.block_size);
    const size_t block_bytes = std::accumulate(of_caches.begin(), of_caches.end(), size_t{0});
    size_t state_bytes = 0;
    for (const auto& record : records_) state_bytes += record->state.stride * sizeof(float);
    check_moved("block_saves", pending.block_saves, block_bytes, limits.num_blocks);
    check_moved("block_loads", pending.block_loads, block_bytes, limits.num_blocks);
    check_moved("snapshot_saves", pending.snapshot_saves, state_bytes, limits.num_states);
    check_moved("snapshot_loads", pending.snapshot_loads, state_bytes, limits.num_states);
}

// Each worker moves only the caches that it copies in copy_blocks, so the three steps need no barrier in between.
void Program::move_blocks(const PendingStep& pending, const Worker& worker) {
    if (!pending.moves()) return;
    size_t offset = 0;
    for (size_t i = 0; i < caches_.size(); offset += caches_[i++].block_bytes)
        if (i % worker.count == static_cast<size_t>(worker.index))
            move_part(caches_[i].memory.data(), caches_[i].block_bytes, offset, pending.block_saves,
                      pending.block_loads);
}

// The same for states, with the operations' states one after the other.
void Program::move_states(const PendingStep& pending, const Worker& worker) {
    if (!pending.moves()) return;
    size_t offset = 0;
    for (size_t i = 0; i < records_.size(); offset += records_[i++]->state.stride * sizeof(float)) {
        const StateSlots& state = records_[i]->state;
        if (state.data && i % worker.count == static_cast<size_t>(worker.index))
            move_part(reinterpret_cast<char*>(state.data), state.stride * sizeof(float), offset, pending.snapshot_saves,
                      pending.snapshot_loads);
    }
}

// Each worker copies within its own caches, in the order of the pairs.
void Program::copy_blocks(const Step& step, const Worker& worker) {
    for (size_t i = worker.index; i < caches_.size(); i += worker.count) {
        const Cache& cache = caches_[i];
        char* const data = cache.memory.data();
        for (int32_t pair = 0; data && pair < step.num_block_copies; ++pair) {
            const int32_t source = step.block_copies[2 * pair], destination = step.block_copies[2 * pair + 1];
            if (source != destination)
                std::memcpy(data + destination * cache.block_bytes, data + source * cache.block_bytes,
                            cache.block_bytes);
        }
    }
}

// Each worker copies the states of its own operations, in the order of the pairs.
void Program::copy_states(const Step& step, const Worker& worker) {
    for (size_t i = worker.index; step.num_state_copies > 0 && i < records_.size(); i += worker.count) {
        const StateSlots& state = records_[i]->state;
        for (int32_t pair = 0; state.data && pair < step.num_state_copies; ++pair) {
            const size_t source = step.state_copies[2 * pair], destination = step.state_copies[2 * pair + 1];
            if (source != destination)
                std::memcpy(state.data + destination * state.stride, state.data + source * state.stride,
                            state.stride * sizeof(float));
        }
    }
}

}  // namespace octavo
