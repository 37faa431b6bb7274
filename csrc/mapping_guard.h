// Handles reads of a mapped file that fail because the file was truncated or the disk reported an error.
#pragma once

#include <cstddef>

namespace octavo {

// While a guard exists, a failed read within [data, data + bytes) does not end the process with SIGBUS. Instead, the
// reader sees zeros from there on and the guard reports the damage; discard whatever was computed. Any thread may read.
// Other causes of SIGBUS go to the previously installed handler.
class MappingGuard {
  public:
    // data: the start of the mapping. Throws std::runtime_error if there are too many guards.
    MappingGuard(const void* data, size_t bytes);
    ~MappingGuard();  // destroy it before the mapping ends
    MappingGuard(const MappingGuard&) = delete;
    MappingGuard& operator=(const MappingGuard&) = delete;

    bool is_damaged() const;

  private:
    size_t slot_;
};

}  // namespace octavo
