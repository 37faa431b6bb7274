// Threads and processes on Windows, which has neither forks nor signals to block.
#include "platform/threads.h"

#include "platform/windows/system.h"

namespace octavo::platform {

int process_id() { return static_cast<int>(GetCurrentProcessId()); }

void name_thread(const std::string& name) {
    SetThreadDescription(GetCurrentThread(), std::wstring(name.begin(), name.end()).c_str());
}

BlockedSignals::BlockedSignals() : previous_{} {}

BlockedSignals::~BlockedSignals() = default;

}  // namespace octavo::platform
