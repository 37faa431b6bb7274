#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(LayerNorm, (x), (weight, bias), (group), (eps));

void layer_norm(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[LayerNorm::x];
    const int64_t wanted = args.ints[LayerNorm::group], n = wanted ? wanted : x.cols;
    const Weight &weights = args.weights[LayerNorm::weight], &biases = args.weights[LayerNorm::bias];
    const Range groups = share(x.rows * (x.cols / n), worker);
    for (int64_t i = groups.begin; i < groups.end; ++i) {
        const float* row = x.data + i * n;
        const float* weight = weights.data + i * n % x.cols;
        const float* bias = biases.data ? biases.data + i * n % x.cols : nullptr;
        const float mean = sum_columns(row, n, 0.0f, [](F32x16 v, F32x16 sum) { return sum + v; }) / n;
        const F32x16 center = broadcast(mean);
        const float squares = sum_columns(row, n, mean, [center](F32x16 v, F32x16 sum) {
            const F32x16 d = v - center;
            return fma(d, d, sum);
        });
        const F32x16 inverse = broadcast(1.0f / __builtin_sqrtf(squares / n + args.floats[LayerNorm::eps]));
        map_columns(args.output.data + i * n, row, n, [&](F32x16 v, auto read) {
            const F32x16 normed = (v - center) * inverse * read(weight);
            return bias ? normed + read(bias) : normed;
        });
    }
}

bool layer_norm_fits(const Args& args) {
    const View& x = args.inputs[LayerNorm::x];
    const int64_t wanted = args.ints[LayerNorm::group], group = wanted ? wanted : x.cols;
    return group > 0 && x.cols % group == 0 && is_like(x, args.output) &&
           is_vector(args.weights[LayerNorm::weight], x.cols) &&
           is_vector_or_absent(args.weights[LayerNorm::bias], x.cols);
}

}  // namespace
OCTAVO_KERNEL(layer_norm, LayerNorm);
}  // namespace octavo
