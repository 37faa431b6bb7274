#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Scale, (x), (), (), (factor));

void scale(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Scale::x].data;
    const F32x16 factor = broadcast(args.floats[Scale::factor]);
    map_elements(args.output, worker, [x, factor](auto read) { return read(x) * factor; });
}

bool scale_fits(const Args& args) { return is_like(args.inputs[Scale::x], args.output); }

}  // namespace
OCTAVO_KERNEL(scale, Scale);
}  // namespace octavo
