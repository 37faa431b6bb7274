#include "checksum.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int LANES = 8;  // independent chains, because a multiplication has a longer latency than a load
constexpr size_t STEP = LANES * sizeof(uint64_t);
constexpr uint64_t ODD = 0x9e3779b97f4a7c15ull;

// Both operations are invertible, so states that differ stay different.
uint64_t mix(uint64_t state, uint64_t word) {
    const uint64_t product = (state ^ word) * ODD;
    return product ^ product >> 32;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t size) {
    uint64_t lanes[LANES], words[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = ODD * static_cast<uint64_t>(i + 1);
    for (size_t at = 0; at < size; at += STEP) {
        const size_t left = std::min(STEP, size - at);
        if (left < STEP) std::memset(words, 0, STEP);
        std::memcpy(words, data + at, left);
        for (int i = 0; i < LANES; ++i) lanes[i] = mix(lanes[i], words[i]);
    }
    uint64_t result = size;
    for (const uint64_t lane : lanes) result = mix(result, lane);
    return result;
}

}  // namespace octavo
