#include "activations.h"
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Activation, (x), (), (kind), ());

void activation(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Activation::x].data;
    with_activation(args.ints[Activation::kind], [&](auto function) {
        map_elements(args.output, worker, [x, function](auto read) { return function(read(x)); });
    });
}

bool activation_fits(const Args& args) {
    return is_like(args.inputs[Activation::x], args.output) && is_activation(args.ints[Activation::kind]);
}

}  // namespace
OCTAVO_KERNEL(activation, Activation);
}  // namespace octavo
