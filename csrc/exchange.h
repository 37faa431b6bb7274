// A group of ranks as the kernels of AllReduce and AllGather see it. A program gives it to them as their shared
// scratch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Shared memory in two halves for each rank, which take turns, and a barrier of all ranks (collective.h). Worker 0
// calls the barrier; the others read `met` after the next barrier of their pool.
struct Exchange {
    static constexpr size_t HEADER_BYTES = 64;  // of a half, before its numbers: an int64, the columns of the rank
    int32_t rank, size;
    char* const* halves;   // [2, size]
    size_t bytes;          // of a half without its header
    uint32_t turn;         // barriers passed; turn % 2 is the half to write next
    bool met;              // false: a rank is gone, and what the kernel reads is worthless; the step ends
    uint64_t given_bytes;  // that this rank has written for the others so far
    bool (*barrier)(Exchange&);
    void* group;
    static constexpr int32_t MAX_RANKS = 64;
    int32_t columns[MAX_RANKS];  // of each rank in the values that AllGather has put together last
    __attribute__((always_inline)) char* half(int32_t of_rank, uint32_t at) const {
        return halves[at % 2 * static_cast<uint32_t>(size) + static_cast<uint32_t>(of_rank)];
    }
};

}  // namespace octavo
