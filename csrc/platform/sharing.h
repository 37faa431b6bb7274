// Named memory that several processes of a machine map.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace octavo::platform {

class SharedSegment {
  public:
    SharedSegment() = default;  // empty
    // Creates a segment and reserves all its memory. Throws std::runtime_error if the name is taken or there is no
    // room. numa_node: the node for its pages, whoever touches them first; -1: where they are touched. placement_error:
    // an errno if they are not allocated there, else 0.
    static SharedSegment create(const std::string& name, size_t bytes, int32_t numa_node, int* placement_error);
    // Opens a segment created by another process. Returns an empty one if it is not complete yet.
    static SharedSegment open(const std::string& name, size_t bytes);
    ~SharedSegment();  // also removes the name of a segment that it created
    SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
    SharedSegment& operator=(SharedSegment&& other) noexcept;

    void* data() const { return data_; }
    // Call it on a created segment once all processes have opened it, so that nothing can be left behind.
    void remove_name();

  private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
    std::string name_;        // set while the name must still be removed
    void* handle_ = nullptr;  // system handle, while the name needs one
};

}  // namespace octavo::platform
