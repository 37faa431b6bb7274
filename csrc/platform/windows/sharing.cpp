// Named memory on Windows: a section of the paging file. Its name exists as long as a handle, its memory as long as a
// view.
#include "platform/sharing.h"

#include <stdexcept>
#include <utility>

#include "platform/windows/system.h"

namespace octavo::platform {
namespace {

std::string full_name(const std::string& name) { return "Local\\" + name; }

std::runtime_error failure(const std::string& name, const char* problem) {
    const std::string code = std::to_string(GetLastError());
    return std::runtime_error(full_name(name) + ": " + problem + " (error " + code + ")");
}

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, size_t bytes, int32_t, int* placement_error) {
    *placement_error = 0;
    const DWORD high = static_cast<DWORD>(uint64_t{bytes} >> 32), low = static_cast<DWORD>(bytes);
    SharedSegment made;
    made.handle_ =
        CreateFileMappingA(INVALID_HANDLE_VALUE, nullptr, PAGE_READWRITE, high, low, full_name(name).c_str());
    if (!made.handle_) throw failure(name, "no room for shared memory");
    if (GetLastError() == ERROR_ALREADY_EXISTS) throw failure(name, "is this rank already running?");
    made.data_ = MapViewOfFile(made.handle_, FILE_MAP_ALL_ACCESS, 0, 0, bytes);
    if (!made.data_) throw failure(name, "no room for shared memory");
    made.bytes_ = bytes;
    return made;
}

SharedSegment SharedSegment::open(const std::string& name, size_t bytes) {
    SharedSegment found;
    const HANDLE handle = OpenFileMappingA(FILE_MAP_ALL_ACCESS, FALSE, full_name(name).c_str());
    if (!handle) return found;
    found.data_ = MapViewOfFile(handle, FILE_MAP_ALL_ACCESS, 0, 0, bytes);
    found.bytes_ = bytes;
    CloseHandle(handle);
    return found;
}

SharedSegment::~SharedSegment() {
    remove_name();
    if (data_) UnmapViewOfFile(data_);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(name_, other.name_);
    std::swap(handle_, other.handle_);
    return *this;
}

void SharedSegment::remove_name() {
    if (handle_) CloseHandle(handle_);
    handle_ = nullptr;
}

}  // namespace octavo::platform
