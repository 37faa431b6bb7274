#include "elementwise.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Add, (a, b), (), (), ());

void add(const Args& args, const Step&, Worker& worker) {
    const float *a = args.inputs[Add::a].data, *b = args.inputs[Add::b].data;
    map_elements(args.output, worker, [a, b](auto read) { return read(a) + read(b); });
}

}  // namespace
OCTAVO_KERNEL(add, Add);
}  // namespace octavo
