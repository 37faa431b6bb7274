// Processor properties reported by Linux.
#include "platform/features.h"

#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace octavo::platform {

size_t level1_data_bytes() {
    const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    return bytes > 0 ? static_cast<size_t>(bytes) : 0;
}

#if defined(__x86_64__)
bool allow_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#else
bool allow_tiles() { return false; }
#endif

#if defined(__aarch64__)
ArmFeatures arm_features() {
    constexpr uint64_t ASIMD = 1 << 1, ATOMICS = 1 << 8, ASIMDRDM = 1 << 12, ASIMDDP = 1 << 20;  // AT_HWCAP
    constexpr uint64_t V82 = ATOMICS | ASIMDRDM | ASIMDDP, I8MM = 1 << 13;                       // AT_HWCAP2
    const uint64_t first = getauxval(AT_HWCAP);
    return {(first & ASIMD) != 0, (first & V82) == V82, (getauxval(AT_HWCAP2) & I8MM) != 0};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

}  // namespace octavo::platform
