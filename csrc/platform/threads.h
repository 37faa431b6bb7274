// Threads and processes: names, numbers, and signals that a thread does not take.
#pragma once

#include <string>

namespace octavo::platform {

// Differs in a fork.
int process_id();

// Of the calling thread, for debuggers. At most 15 characters.
void name_thread(const std::string& name);

// While it lives, this thread and those that it starts take no signal but those that a thread causes itself: the others
// belong to the program's own threads, where Python handles Ctrl-C.
class BlockedSignals {
  public:
    BlockedSignals();
    ~BlockedSignals();
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

  private:
    [[maybe_unused]] alignas(16) unsigned char previous_[128];  // the system's set of signals
};

}  // namespace octavo::platform
