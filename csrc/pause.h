// Pauses a thread that waits in a loop.
#pragma once

namespace octavo {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");  // about as long as the x86 pause; `yield` does nothing on most cores
#endif
}

}  // namespace octavo
