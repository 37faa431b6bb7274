#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(ScaleColumns, (x), (weight), (), ());

void scale_columns(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[ScaleColumns::x];
    const Weight& weight = args.weights[ScaleColumns::weight];
    const F32x16 factor = broadcast(weight.data[0]);
    if (weight.size == 1) return map_elements(args.output, worker, [&](auto read) { return read(x.data) * factor; });
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        map_columns(args.output.data + r * x.cols, x.data + r * x.cols, x.cols,
                    [&](F32x16 v, auto read) { return v * read(weight.data); });
}

bool scale_columns_fits(const Args& args) {
    const View& x = args.inputs[ScaleColumns::x];
    const Weight& weight = args.weights[ScaleColumns::weight];
    return is_like(x, args.output) && (is_vector(weight, 1) || is_vector(weight, x.cols));
}

}  // namespace
OCTAVO_KERNEL(scale_columns, ScaleColumns);
}  // namespace octavo
