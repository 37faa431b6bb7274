#include "activations.h"
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(GatedActivation, (gate, up), (), (kind), ());

void gated_activation(const Args& args, const Step&, Worker& worker) {
    const float *gate = args.inputs[GatedActivation::gate].data, *up = args.inputs[GatedActivation::up].data;
    with_activation(args.ints[GatedActivation::kind], [&](auto function) {
        map_elements(args.output, worker, [gate, up, function](auto read) { return function(read(gate)) * read(up); });
    });
}

bool gated_activation_fits(const Args& args) {
    const View &gate = args.inputs[GatedActivation::gate], &up = args.inputs[GatedActivation::up];
    return is_like(gate, args.output) && is_like(up, args.output) && is_activation(args.ints[GatedActivation::kind]);
}

}  // namespace
OCTAVO_KERNEL(gated_activation, GatedActivation);
}  // namespace octavo
