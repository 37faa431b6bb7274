#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Mul, (a, b), (), (), ());

// b has one column.
void mul_rows(const View& a, const float* b, const View& out, const Worker& worker) {
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        for (int32_t c = 0; c < out.cols; c += 16) {
            const int lanes = out.cols - c < 16 ? out.cols - c : 16;
            const int64_t at = r * out.cols + c;
            store_partial(out.data + at, load_partial(a.data + at, lanes) * broadcast(b[r]), lanes);
        }
}

void mul(const Args& args, const Step&, Worker& worker) {
    const View &a = args.inputs[Mul::a], &b = args.inputs[Mul::b];
    if (b.cols == 1 && a.cols > 1) return mul_rows(a, b.data, args.output, worker);
    map_elements(args.output, worker, [&](auto read) { return read(a.data) * read(b.data); });
}

bool mul_fits(const Args& args) {
    const View &a = args.inputs[Mul::a], &b = args.inputs[Mul::b];
    return is_like(a, args.output) && has_rows_of(b, a) && (b.cols == 1 || b.cols == a.cols);
}

}  // namespace
OCTAVO_KERNEL(mul, Mul);
}  // namespace octavo
