#include "activations.h"
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Softcap, (x), (), (), (cap));

void softcap(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Softcap::x].data;
    const F32x16 cap = broadcast(args.floats[Softcap::cap]);
    map_elements(args.output, worker, [x, cap](auto read) { return cap * tanh(read(x) / cap); });
}

bool softcap_fits(const Args& args) { return is_like(args.inputs[Softcap::x], args.output); }

}  // namespace
OCTAVO_KERNEL(softcap, Softcap);
}  // namespace octavo
