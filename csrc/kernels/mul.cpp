#include "elementwise.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Mul, (a, b), (), (), ());

void mul(const Args& args, const Step&, Worker& worker) {
    const float *a = args.inputs[Mul::a].data, *b = args.inputs[Mul::b].data;
    map_elements(args.output, worker, [a, b](auto read) { return read(a) * read(b); });
}

}  // namespace
OCTAVO_KERNEL(mul, Mul);
}  // namespace octavo
