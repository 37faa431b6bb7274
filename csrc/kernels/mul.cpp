#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Mul, (a, b), (), (), ());

// Each number of b multiplies a group of adjacent columns.
void mul_groups(const View& a, const View& b, const View& out, const Worker& worker) {
    const Range groups = share(static_cast<int64_t>(b.rows) * b.cols, worker);
    const int32_t size = a.cols / b.cols;
    for (int64_t g = groups.begin; g < groups.end; ++g)
        for (int32_t c = 0; c < size; c += 16) {
            const int lanes = size - c < 16 ? size - c : 16;
            const int64_t at = g * size + c;
            store_partial(out.data + at, load_partial(a.data + at, lanes) * broadcast(b.data[g]), lanes);
        }
}

void mul(const Args& args, const Step&, Worker& worker) {
    const View &a = args.inputs[Mul::a], &b = args.inputs[Mul::b];
    if (b.cols < a.cols) return mul_groups(a, b, args.output, worker);
    map_elements(args.output, worker, [&](auto read) { return read(a.data) * read(b.data); });
}

bool mul_fits(const Args& args) {
    const View &a = args.inputs[Mul::a], &b = args.inputs[Mul::b];
    return is_like(a, args.output) && has_rows_of(b, a) && b.cols > 0 && a.cols % b.cols == 0;
}

}  // namespace
OCTAVO_KERNEL(mul, Mul);
}  // namespace octavo
