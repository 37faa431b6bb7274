// Gather: rows by an index, several of them side by side. Splice: given rows in place of some.
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Gather, (x), (), (index, width), ());
OCTAVO_SIGNATURE(Splice, (x, given), (), (index), ());

void gather(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[Gather::x], &out = args.output;
    const int32_t* const index = step.index(args.ints[Gather::index]);
    const int64_t width = args.ints[Gather::width];
    const Range rows = share(out.rows * width, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        __builtin_memcpy(out.data + r * x.cols, x.data + static_cast<int64_t>(index[r]) * x.cols,
                         sizeof(float) * x.cols);
}

bool gather_fits(const Args& args) {
    const int64_t width = args.ints[Gather::width];
    return width > 0 && has_cols(args.output, width * args.inputs[Gather::x].cols);
}

// The output may be x.
void splice(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[Splice::x], &given = args.inputs[Splice::given], &out = args.output;
    const int32_t* const index = step.index(args.ints[Splice::index]);
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t row = index ? index[r] : -1;
        const float* const from = row < 0 ? x.data + r * x.cols : given.data + row * given.cols;
        float* const to = out.data + r * out.cols;
        if (from != to) __builtin_memcpy(to, from, sizeof(float) * out.cols);
    }
}

bool splice_fits(const Args& args) {
    const View &x = args.inputs[Splice::x], &given = args.inputs[Splice::given];
    return is_like(args.output, x) && has_cols(given, x.cols);
}

}  // namespace
OCTAVO_KERNEL(gather, Gather);
OCTAVO_KERNEL(splice, Splice);
}  // namespace octavo
