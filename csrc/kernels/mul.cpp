#include "elementwise.h"

namespace octavo {
namespace {

void mul(const Args& args, const Step&, Worker& worker) {
    const float *a = args.inputs[0].data, *b = args.inputs[1].data;
    map_elements(args.output, worker, [a, b](auto read) { return read(a) * read(b); });
}

}  // namespace
OCTAVO_KERNEL(mul);
}  // namespace octavo
