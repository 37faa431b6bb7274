// A checksum that is as fast as memory. It detects damaged bytes but does not protect against forgery.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Any change within one aligned word changes the result. Other changes go unnoticed once in 2^64. The result is the
// same on every little-endian machine.
uint64_t checksum(const uint8_t* data, size_t size);

}  // namespace octavo
