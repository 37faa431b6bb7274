// Thread names on macOS, where a thread can only name itself.
#include <pthread.h>

#include "platform/threads.h"

namespace octavo::platform {

void name_thread(const std::string& name) { pthread_setname_np(name.c_str()); }

}  // namespace octavo::platform
