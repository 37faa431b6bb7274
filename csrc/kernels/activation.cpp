#include "activations.h"
#include "elementwise.h"

namespace octavo {
namespace {

void activation(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[0].data;
    with_activation(args.ints[0], [&](auto function) {
        map_elements(args.output, worker, [x, function](auto read) { return function(read(x)); });
    });
}

}  // namespace
OCTAVO_KERNEL(activation);
}  // namespace octavo
