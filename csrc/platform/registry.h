// Lists of constants to which any file can add. The linker of each system collects them, without code at load time.
//
// OCTAVO_LISTED(name) before a constant adds it to the list. Its alignment must equal its size, so that there are no
// gaps. OCTAVO_LIST(type, name), outside of namespaces, defines octavo_first_of_NAME() and octavo_end_of_NAME().
#pragma once

#if defined(_WIN32)
#include "platform/windows/registry.h"
#elif defined(__APPLE__)
#include "platform/darwin/registry.h"
#else
#include "platform/linux/registry.h"
#endif
