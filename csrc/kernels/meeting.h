// A barrier for the workers of all ranks of a group, used by the kernels that exchange values (collective.h).
#pragma once

#include "exchange.h"
#include "kernel.h"

namespace octavo {
namespace {

inline float* numbers(const Exchange& e, int32_t rank, uint32_t turn) {
    return reinterpret_cast<float*>(e.half(rank, turn) + Exchange::HEADER_BYTES);
}

// Returns true on all workers if all ranks have arrived. The data that they wrote to their halves in this turn may then
// be read. bytes: what this rank has written.
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
