#include "activations.h"
#include "elementwise.h"

namespace octavo {
namespace {

void gated_activation(const Args& args, const Step&, Worker& worker) {
    const float *gate = args.inputs[0].data, *up = args.inputs[1].data;
    with_activation(args.ints[0], [&](auto function) {
        map_elements(args.output, worker, [gate, up, function](auto read) { return function(read(gate)) * read(up); });
    });
}

}  // namespace
OCTAVO_KERNEL(gated_activation);
}  // namespace octavo
