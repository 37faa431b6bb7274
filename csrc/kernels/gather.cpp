// Gather: rows selected by one or more indices, side by side. PoolRows: their mean. Splice and AddRows: given rows that
// replace some rows, or are added to them.
#include "elementwise.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Gather, (x), (), (index, width), ());
OCTAVO_SIGNATURE(Splice, (x, given), (), (index), ());
OCTAVO_SIGNATURE(PoolRows, (x), (), (index, width), ());
OCTAVO_SIGNATURE(AddRows, (x, given), (), (index), ());

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

// Copies x, but calls f(to, from, given) for each row that the index has a number for. The output may be x.
template <typename Operands, typename F>
inline void with_given(const Args& args, const Step& step, const Worker& worker, F f) {
    const View &x = args.inputs[Operands::x], &given = args.inputs[Operands::given], &out = args.output;
    const int32_t* const index = step.index(args.ints[Operands::index]);
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t row = index ? index[r] : -1;
        const float* const from = x.data + r * x.cols;
        float* const to = out.data + r * out.cols;
        if (row >= 0)
            f(to, from, given.data + row * given.cols);
        else if (from != to)
            __builtin_memcpy(to, from, sizeof(float) * out.cols);
    }
}

template <typename Operands>
inline bool given_fits(const Args& args) {
    const View& x = args.inputs[Operands::x];
    return is_like(args.output, x) && has_cols(args.inputs[Operands::given], x.cols);
}

void splice(const Args& args, const Step& step, Worker& worker) {
    const size_t bytes = sizeof(float) * args.output.cols;
    with_given<Splice>(args, step, worker,
                       [&](float* to, const float*, const float* given) { __builtin_memcpy(to, given, bytes); });
}

bool splice_fits(const Args& args) { return given_fits<Splice>(args); }

void add_rows(const Args& args, const Step& step, Worker& worker) {
    const int32_t cols = args.output.cols;
    with_given<AddRows>(args, step, worker, [&](float* to, const float* from, const float* given) {
        for (int32_t c = 0; c < cols; ++c) to[c] = from[c] + given[c];
    });
}

bool add_rows_fits(const Args& args) { return given_fits<AddRows>(args); }

void pool_rows(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[PoolRows::x], &out = args.output;
    const int32_t* const index = step.index(args.ints[PoolRows::index]);
    const int64_t width = args.ints[PoolRows::width];
    const F32x16 count = broadcast(static_cast<float>(width));
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        for (int32_t c = 0; c < out.cols; c += 16) {
            const int n = out.cols - c < 16 ? out.cols - c : 16;
            const auto read = [&](int64_t i) {
                const float* const from = x.data + static_cast<int64_t>(index[r * width + i]) * x.cols + c;
                return n == 16 ? load(from) : load_partial(from, n);
            };
            F32x16 sum = read(0);
            for (int64_t i = 1; i < width; ++i) sum = sum + read(i);
            store_partial(out.data + r * out.cols + c, sum / count, n);
        }
}

bool pool_rows_fits(const Args& args) {
    return args.ints[PoolRows::width] > 0 && has_cols(args.output, args.inputs[PoolRows::x].cols);
}

}  // namespace
OCTAVO_KERNEL(gather, Gather);
OCTAVO_KERNEL(splice, Splice);
OCTAVO_KERNEL(pool_rows, PoolRows);
OCTAVO_KERNEL(add_rows, AddRows);
}  // namespace octavo
