#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(SelectRows, (x), (), (), ());

void select_rows(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[SelectRows::x], &out = args.output;
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        __builtin_memcpy(out.data + r * out.cols, x.data + static_cast<int64_t>(step.output_indices[r]) * x.cols,
                         sizeof(float) * out.cols);
}

bool select_rows_fits(const Args& args) { return has_cols(args.inputs[SelectRows::x], args.output.cols); }

}  // namespace
OCTAVO_KERNEL(select_rows, SelectRows);
}  // namespace octavo
