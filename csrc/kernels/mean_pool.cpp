#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(MeanPool, (x), (), (), ());

// The text of a token, that is, the index of its request.
inline int32_t text_of(const Step& step, int32_t token) {
    int32_t text = 0;
    while (step.query_start_loc[text + 1] <= token) ++text;
    return text;
}

void mean_pool(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[MeanPool::x], &out = args.output;
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int32_t text = text_of(step, step.output_indices[r]);
        const int32_t begin = step.query_start_loc[text], end = step.query_start_loc[text + 1];
        const F32x16 count = broadcast(static_cast<float>(end - begin));
        for (int32_t c = 0; c < out.cols; c += 16) {
            const int n = out.cols - c < 16 ? out.cols - c : 16;
            const auto read = [&](int32_t token) {
                const float* from = x.data + static_cast<int64_t>(token) * x.cols + c;
                return n == 16 ? load(from) : load_partial(from, n);
            };
            F32x16 sum = read(begin);
            for (int32_t token = begin + 1; token < end; ++token) sum = sum + read(token);
            store_partial(out.data + r * out.cols + c, sum / count, n);
        }
    }
}

bool mean_pool_fits(const Args& args) { return has_cols(args.inputs[MeanPool::x], args.output.cols); }

}  // namespace
OCTAVO_KERNEL(mean_pool, MeanPool);
}  // namespace octavo
