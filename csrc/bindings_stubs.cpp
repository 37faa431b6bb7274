// Stand-ins until the files that own these functions have landed; weak, so the real ones win.
#include "bindings.h"
#include "sampling.h"

namespace octavo {
__attribute__((weak)) void bind_weights(nanobind::module_&) {}
__attribute__((weak)) void bind_sampling(nanobind::module_&) {}
__attribute__((weak)) const PackedWeight* packed_weight_of(nanobind::handle) { throw nanobind::type_error("no packing"); }
__attribute__((weak)) size_t sampling_scratch_bytes(int32_t) { return 0; }
__attribute__((weak)) void sample_rows(KernelFn, const SamplingTask&, Worker&) {}
}  // namespace octavo
