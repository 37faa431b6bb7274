#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Add, (a, b), (), (), ());

void add(const Args& args, const Step&, Worker& worker) {
    const float *a = args.inputs[Add::a].data, *b = args.inputs[Add::b].data;
    map_elements(args.output, worker, [a, b](auto read) { return read(a) + read(b); });
}

bool add_fits(const Args& args) {
    const View &a = args.inputs[Add::a], &b = args.inputs[Add::b];
    return is_like(a, args.output) && is_like(b, args.output);
}

}  // namespace
OCTAVO_KERNEL(add, Add);
}  // namespace octavo
