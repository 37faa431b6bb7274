// Processor properties reported by Windows.
#include "platform/features.h"

#include <vector>

#include "platform/windows/system.h"

namespace octavo::platform {

size_t level1_data_bytes() {
    DWORD bytes = 0;
    GetLogicalProcessorInformation(nullptr, &bytes);
    std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> found(bytes / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
    if (!GetLogicalProcessorInformation(found.data(), &bytes)) return 0;
    for (const SYSTEM_LOGICAL_PROCESSOR_INFORMATION& each : found)
        if (each.Relationship == RelationCache && each.Cache.Level == 1 && each.Cache.Type == CacheData)
            return each.Cache.Size;
    return 0;
}

// Windows 11 has a call for this, but it is untested, so the next lower level runs.
bool allow_tiles() { return false; }

ArmFeatures arm_features() {
    constexpr DWORD DOT_PRODUCTS = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
    return {true, IsProcessorFeaturePresent(DOT_PRODUCTS) != 0, false};
}

}  // namespace octavo::platform
