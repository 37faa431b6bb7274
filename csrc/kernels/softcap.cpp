#include "activations.h"
#include "elementwise.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Softcap, (x), (), (), (cap));

void softcap(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Softcap::x].data;
    const F32x16 cap = broadcast(args.floats[Softcap::cap]);
    map_elements(args.output, worker, [x, cap](auto read) { return cap * tanh(read(x) / cap); });
}

}  // namespace
OCTAVO_KERNEL(softcap, Softcap);
}  // namespace octavo
