// Named shared memory: what Linux and macOS have in common.
#include "platform/sharing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "platform/pages.h"
#include "platform/posix/named_files.h"

namespace octavo::platform {

SharedSegment SharedSegment::create(const std::string& name, size_t bytes, int32_t numa_node, int* placement_error) {
    const int file = open_named_file(name, O_RDWR | O_CREAT | O_EXCL);
    if (file < 0)
        throw std::runtime_error(shown_name(name) + ": " + std::strerror(errno) + ": is this rank already running?");
    SharedSegment made;
    made.name_ = name;
    made.bytes_ = bytes;
    *placement_error = 0;
    const int error = map_new_file(file, bytes, numa_node, &made.data_, placement_error);
    ::close(file);
    if (error != 0)
        throw std::runtime_error(shown_name(name) + ": no room for " + std::to_string(bytes >> 20) +
                                 " MiB of shared memory (" + std::strerror(error) + ")" + remedy_for_no_room());
    return made;
}

SharedSegment SharedSegment::open(const std::string& name, size_t bytes) {
    SharedSegment found;
    const int file = open_named_file(name, O_RDWR);
    if (file < 0) return found;
    struct stat info{};
    // Some systems round the size up to whole pages.
    if (fstat(file, &info) == 0 && static_cast<size_t>(info.st_size) >= bytes &&
        static_cast<size_t>(info.st_size) < bytes + page_bytes()) {
        void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (data != MAP_FAILED) found.data_ = data;
        found.bytes_ = bytes;
    }
    ::close(file);
    return found;
}

SharedSegment::~SharedSegment() {
    remove_name();
    if (data_) munmap(data_, bytes_);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(name_, other.name_);
    std::swap(handle_, other.handle_);
    return *this;
}

void SharedSegment::remove_name() {
    if (!name_.empty()) remove_named_file(name_);
    name_.clear();
}

}  // namespace octavo::platform
