// Processes and signals: the calls that Linux and macOS share.
#include "platform/threads.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <new>

namespace octavo::platform {

int process_id() { return getpid(); }

BlockedSignals::BlockedSignals() {
    static_assert(sizeof(sigset_t) <= sizeof previous_ && alignof(sigset_t) <= 16);
    sigset_t all;
    sigfillset(&all);
    // Keep the signals that a thread causes itself: if blocked, they would end the process silently (mapping_guard.h).
    for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, new (previous_) sigset_t);
}

BlockedSignals::~BlockedSignals() {
    pthread_sigmask(SIG_SETMASK, reinterpret_cast<const sigset_t*>(previous_), nullptr);
}

}  // namespace octavo::platform
