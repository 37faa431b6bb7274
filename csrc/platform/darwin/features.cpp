// Processor properties reported by macOS.
#include "platform/features.h"

#include <sys/sysctl.h>

#include <cstdint>

namespace octavo::platform {
namespace {

// A number that the system provides by name; 0 if unknown.
uint64_t number_of(const char* name) {
    uint64_t value = 0;  // 32-bit values fill the lower half
    size_t bytes = sizeof value;
    return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

size_t level1_data_bytes() { return static_cast<size_t>(number_of("hw.l1dcachesize")); }

bool allow_tiles() { return false; }

#if defined(__aarch64__)
ArmFeatures arm_features() {
    const bool v82 = number_of("hw.optional.arm.FEAT_LSE") && number_of("hw.optional.arm.FEAT_RDM") &&
                     number_of("hw.optional.arm.FEAT_DotProd");
    return {true, v82, number_of("hw.optional.arm.FEAT_I8MM") != 0};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

}  // namespace octavo::platform
