#include "elementwise.h"

namespace octavo {
namespace {

void scale(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[0].data;
    const F32x16 factor = broadcast(args.floats[0]);
    map_elements(args.output, worker, [x, factor](auto read) { return read(x) * factor; });
}

}  // namespace
OCTAVO_KERNEL(scale);
}  // namespace octavo
