// Reads of a mapped file that fail: the file was truncated, or the disk gave an error.
#pragma once

#include <cstddef>

namespace octavo {

// While it lives, a failed read within [data, data + bytes) does not end the process with SIGBUS. The reader sees zeros
// from there on, and the guard says so; what was computed must be thrown away. Any thread may read. Other causes of
// SIGBUS go to the handler that was there before.
class MappingGuard {
  public:
    // data: the beginning of the mapping. Throws std::runtime_error if there are too many guards.
    MappingGuard(const void* data, size_t bytes);
    ~MappingGuard();  // before the mapping ends
    MappingGuard(const MappingGuard&) = delete;
    MappingGuard& operator=(const MappingGuard&) = delete;

    bool is_damaged() const;

  private:
    size_t slot_;
};

}  // namespace octavo
