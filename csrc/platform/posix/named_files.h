// Named files in memory: the parts of sharing.cpp in which Linux and macOS differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace octavo::platform {

// Returns a descriptor, or -1 with errno. flags: as for open().
int open_named_file(const std::string& name, int flags);
void remove_named_file(const std::string& name);
// The name for error messages, with the remedy if there is no room.
std::string shown_name(const std::string& name);
const char* remedy_for_no_room();

// Maps a new file and sets its size. Returns an errno, or 0. placement_error: see SharedSegment::create.
int map_new_file(int file, size_t bytes, int32_t numa_node, void** data, int* placement_error);

}  // namespace octavo::platform
