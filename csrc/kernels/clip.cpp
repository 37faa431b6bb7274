#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Clip, (x), (), (), (low, high));

// min and max keep a NaN in their second operand.
void clip(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Clip::x].data;
    const F32x16 low = broadcast(args.floats[Clip::low]), high = broadcast(args.floats[Clip::high]);
    map_elements(args.output, worker, [=](auto read) { return max(low, min(high, read(x))); });
}

bool clip_fits(const Args& args) { return is_like(args.inputs[Clip::x], args.output); }

}  // namespace
OCTAVO_KERNEL(clip, Clip);
}  // namespace octavo
