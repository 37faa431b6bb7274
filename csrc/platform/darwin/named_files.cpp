// Objects of shm_open, whose names have at most 31 characters. macOS has a single NUMA node.
#include "platform/posix/named_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace octavo::platform {

int open_named_file(const std::string& name, int flags) {
    const int file = shm_open(shown_name(name).c_str(), flags, 0600);
    if (file >= 0) fcntl(file, F_SETFD, FD_CLOEXEC);
    return file;
}

void remove_named_file(const std::string& name) { shm_unlink(shown_name(name).c_str()); }

std::string shown_name(const std::string& name) { return "/" + name; }

const char* remedy_for_no_room() { return ""; }

// The size of such an object can be set only once, before it is mapped.
int map_new_file(int file, size_t bytes, int32_t, void** data, int*) {
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) return errno;
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return errno;
    *data = memory;
    return 0;
}

}  // namespace octavo::platform
