// Stand-ins until the files that own these functions have landed; weak, so the real ones win.
#include "bindings.h"

namespace octavo {
__attribute__((weak)) void bind_weights(nanobind::module_&) {}
__attribute__((weak)) void bind_sampling(nanobind::module_&) {}
__attribute__((weak)) const PackedWeight* packed_weight_of(nanobind::handle) { throw nanobind::type_error("no packing"); }
}  // namespace octavo
