// Memory with a name, which several processes of a machine map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace octavo::platform {

class SharedSegment {
  public:
    SharedSegment() = default;  // no memory
    // A new one, all of which is there. Throws std::runtime_error if the name is taken or there is no room.
    // numa_node: for its pages, whoever touches them first; -1: where they are touched. placement_error: an errno if
    // they are not taken from there, else 0.
    static SharedSegment create(const std::string& name, size_t bytes, int32_t numa_node, int* placement_error);
    // One that another process has made; without memory if that is not done yet.
    static SharedSegment open(const std::string& name, size_t bytes);
    ~SharedSegment();  // also removes the name of one that was created
    SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
    SharedSegment& operator=(SharedSegment&& other) noexcept;

    void* data() const { return data_; }
    // Of one that was created, once all have opened it: whatever happens later, nothing is left.
    void remove_name();

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
    std::string name_;        // while it is to be removed
    void* handle_ = nullptr;  // of the system, while the name needs one
};

}  // namespace octavo::platform
