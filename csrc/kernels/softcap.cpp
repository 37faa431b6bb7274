#include "activations.h"
#include "elementwise.h"

namespace octavo {
namespace {

void softcap(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[0].data;
    const F32x16 cap = broadcast(args.floats[0]);
    map_elements(args.output, worker, [x, cap](auto read) { return cap * tanh(read(x) / cap); });
}

}  // namespace
OCTAVO_KERNEL(softcap);
}  // namespace octavo
