// Lists of constants that any file adds to: the linker of each system gathers them, and no code runs at load time.
//
// OCTAVO_LISTED(name) before a constant puts it on the list. Its alignment must be its size, so that the linker leaves
// no gap. OCTAVO_LIST(type, name), outside of namespaces, defines octavo_first_of_NAME() and octavo_end_of_NAME().
#pragma once

#if defined(_WIN32)
#include "platform/windows/registry.h"
#elif defined(__APPLE__)
#include "platform/darwin/registry.h"
#else
#include "platform/linux/registry.h"
#endif
