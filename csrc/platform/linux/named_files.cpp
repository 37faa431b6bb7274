// Files in /dev/shm, whose pages can be allocated on a NUMA node.
#include "platform/posix/named_files.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace octavo::platform {
namespace {

// Allocates the pages of shared memory on this node while it has free ones, when they are first touched. Returns an
// errno, or 0. Such memory has one policy for all processes that map it.
int prefer_node(void* memory, size_t bytes, int32_t node) {
    constexpr int32_t MAX_NODES = 1024, BITS = 8 * sizeof(unsigned long);
    if (node >= MAX_NODES) return EINVAL;
    unsigned long mask[MAX_NODES / BITS] = {};
    mask[node / BITS] = 1UL << node % BITS;
    return syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, mask, MAX_NODES + 1UL, 0) == 0 ? 0 : errno;
}

}  // namespace

int open_named_file(const std::string& name, int flags) {
    return open(shown_name(name).c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
}

void remove_named_file(const std::string& name) { unlink(shown_name(name).c_str()); }

std::string shown_name(const std::string& name) { return "/dev/shm/" + name; }

const char* remedy_for_no_room() { return ": enlarge /dev/shm (docker run --shm-size)"; }

int map_new_file(int file, size_t bytes, int32_t numa_node, void** data, int* placement_error) {
    // Mapped while it has no pages: otherwise another rank, which reads the first page as soon as the file has its
    // size, would allocate that page on its own node. Only the reservation sets the size of the file, so that a page
    // that another rank sees already exists.
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return errno;
    *data = memory;
    if (numa_node >= 0) *placement_error = prefer_node(memory, bytes, numa_node);
    int error = EINTR;
    while (error == EINTR) error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
    return error;
}

}  // namespace octavo::platform
