// Files in memory that have a name: what Linux and macOS do differently beneath sharing.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace octavo::platform {

// A descriptor, or -1 with errno. flags: of open().
int open_named_file(const std::string& name, int flags);
void remove_named_file(const std::string& name);
// The name in errors, and the remedy if there is no room.
std::string shown_name(const std::string& name);
const char* remedy_for_no_room();

// Maps a new file and gives it its size. Returns an errno, or 0. placement_error: see SharedSegment::create.
int map_new_file(int file, size_t bytes, int32_t numa_node, void** data, int* placement_error);

}  // namespace octavo::platform
