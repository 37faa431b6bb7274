// Thread names on Linux.
#include <pthread.h>

#include "platform/threads.h"

namespace octavo::platform {

void name_thread(const std::string& name) { pthread_setname_np(pthread_self(), name.c_str()); }

}  // namespace octavo::platform
