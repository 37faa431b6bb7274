// A group of ranks as seen by the AllReduce and AllGather kernels. A program passes it to them as their shared
// scratch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Two alternating halves of shared memory per rank, and a barrier across all ranks (collective.h). Worker 0 calls the
// barrier; the other workers read `met` after the next barrier of their pool.
struct Exchange {
    static constexpr size_t HEADER_BYTES = 64;  // of each half, before its numbers: an int64, the rank's columns
    int32_t rank, size;
    char* const* halves;   // [2, size]
    size_t bytes;          // size of a half without its header
    uint32_t turn;         // barriers passed; turn % 2 is the half to write next
    bool met;              // false: a rank is gone, the data is invalid and the step ends
    uint64_t given_bytes;  // written by this rank for other ranks so far
    bool (*barrier)(Exchange&);
    void* group;
    static constexpr int32_t MAX_RANKS = 64;
    int32_t columns[MAX_RANKS];  // columns of each rank in the last value that AllGather put together
    __attribute__((always_inline)) char* half(int32_t of_rank, uint32_t at) const {
        return halves[at % 2 * static_cast<uint32_t>(size) + static_cast<uint32_t>(of_rank)];
    }
};

}  // namespace octavo
