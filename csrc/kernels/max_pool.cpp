// MaxPool: the maximum of each column over the tokens of a text.
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(MaxPool, (x), (), (), ());

void max_pool(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[MaxPool::x], &out = args.output;
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        int32_t text = 0;
        while (step.query_start_loc[text + 1] <= step.output_indices[r]) ++text;
        const int32_t begin = step.query_start_loc[text], end = step.query_start_loc[text + 1];
        for (int32_t c = 0; c < out.cols; c += 16) {
            const int n = out.cols - c < 16 ? out.cols - c : 16;
            const auto read = [&](int32_t token) {
                const float* from = x.data + static_cast<int64_t>(token) * x.cols + c;
                return n == 16 ? load(from) : load_partial(from, n);
            };
            F32x16 largest = read(begin);
            for (int32_t token = begin + 1; token < end; ++token) largest = max(largest, read(token));
            store_partial(out.data + r * out.cols + c, largest, n);
        }
    }
}

bool max_pool_fits(const Args& args) { return has_cols(args.inputs[MaxPool::x], args.output.cols); }

}  // namespace
OCTAVO_KERNEL(max_pool, MaxPool);
}  // namespace octavo
