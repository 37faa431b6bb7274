// How the workers of all ranks of a group meet, for the kernels that exchange values (collective.h).
#pragma once

#include "exchange.h"
#include "kernel.h"

namespace octavo {
namespace {

inline float* numbers(const Exchange& e, int32_t rank, uint32_t turn) {
    return reinterpret_cast<float*>(e.half(rank, turn) + Exchange::HEADER_BYTES);
}

// True on all workers if all ranks have come; what they wrote to their halves of this turn may then be read. bytes:
// that this rank has written.
inline bool meet(Exchange& e, uint32_t& turn, Worker& worker, size_t bytes) {
    worker.barrier();
    if (worker.index == 0) {
        e.given_bytes += bytes;
        e.met = e.barrier(e);
    }
    worker.barrier();
    ++turn;
    return e.met;
}

}  // namespace
}  // namespace octavo
