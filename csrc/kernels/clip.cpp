#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Clip, (x), (), (), (limit));

// The second operand of min and max survives if it is NaN.
void clip(const Args& args, const Step&, Worker& worker) {
    const float* x = args.inputs[Clip::x].data;
    const F32x16 high = broadcast(args.floats[Clip::limit]), low = broadcast(-args.floats[Clip::limit]);
    map_elements(args.output, worker, [=](auto read) { return max(low, min(high, read(x))); });
}

bool clip_fits(const Args& args) { return is_like(args.inputs[Clip::x], args.output); }

}  // namespace
OCTAVO_KERNEL(clip, Clip);
}  // namespace octavo
