#include "activations.h"
#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Sparsify, (x), (), (), (deviations));

void sparsify(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[Sparsify::x];
    const float n = static_cast<float>(x.cols);
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* const row = x.data + r * x.cols;
        const float mean = sum_columns(row, x.cols, 0.0f, [](F32x16 v, F32x16 sum) { return sum + v; }) / n;
        const F32x16 middle = broadcast(mean);
        const float squares =
            sum_columns(row, x.cols, mean, [middle](F32x16 v, F32x16 sum) { return fma(v - middle, v - middle, sum); });
        const F32x16 cut = broadcast(mean + args.floats[Sparsify::deviations] * __builtin_sqrtf(squares / n));
        map_columns(args.output.data + r * x.cols, row, x.cols, [cut](F32x16 v, auto) { return relu(v - cut); });
    }
}

bool sparsify_fits(const Args& args) { return is_like(args.inputs[Sparsify::x], args.output); }

}  // namespace
OCTAVO_KERNEL(sparsify, Sparsify);
}  // namespace octavo
