#include "activations.h"
#include "elementwise.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Activation, (x), (), (kind), ());

void activation(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Activation::x].data;
    with_activation(args.ints[Activation::kind], [&](auto function) {
        map_elements(args.output, worker, [x, function](auto read) { return function(read(x)); });
    });
}

}  // namespace
OCTAVO_KERNEL(activation, Activation);
}  // namespace octavo
