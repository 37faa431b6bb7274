// Threads and processes: names, ids, and blocked signals.
#pragma once

#include <string>

namespace octavo::platform {

// Changes in a forked process.
int process_id();

// Names the calling thread for debuggers. At most 15 characters.
void name_thread(const std::string& name);

// While this exists, the thread and those that it starts receive only signals that a thread causes itself. All other
// signals go to the program's own threads, where Python handles Ctrl-C.
class BlockedSignals {
  public:
    BlockedSignals();
    ~BlockedSignals();
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

  private:
    [[maybe_unused]] alignas(16) unsigned char previous_[128];  // the previous signal set, in the system's format
};

}  // namespace octavo::platform
