// GroupSums and SpanningNorm: norms over columns that are split across ranks.
#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(GroupSums, (x, sums), (), (group, begin, num_groups, power), ());
OCTAVO_SIGNATURE(SpanningNorm, (x, sums, squares), (weight, bias), (group, begin, num_groups), (eps));

// A rank's columns [begin, end) that belong to one group.
inline Range columns_of_group(int64_t index, int64_t group, int64_t first, int64_t cols) {
    const int64_t begin = index * group - first, end = begin + group;
    return {begin > 0 ? begin : 0, end < cols ? end : cols};
}

void group_sums(const Args& args, const Step&, Worker& worker) {
    const View &x = args.inputs[GroupSums::x], &sums = args.inputs[GroupSums::sums];
    const int64_t group = args.ints[GroupSums::group], num_groups = args.ints[GroupSums::num_groups];
    const Range mine = share(x.rows * num_groups, worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const Range columns = columns_of_group(i % num_groups, group, args.ints[GroupSums::begin], x.cols);
        const int64_t count = columns.end - columns.begin;
        const float mean = sums.data ? sums.data[i] / static_cast<float>(group) : 0.0f;
        const F32x16 center = broadcast(mean);
        const bool is_square = args.ints[GroupSums::power] == 2;
        const float* const from = x.data + i / num_groups * x.cols + columns.begin;
        args.output.data[i] = count <= 0 ? 0.0f : sum_columns(from, count, mean, [&](F32x16 v, F32x16 sum) {
            const F32x16 d = v - center;
            return is_square ? fma(d, d, sum) : sum + d;
        });
    }
}

void spanning_norm(const Args& args, const Step&, Worker& worker) {
    const View &x = args.inputs[SpanningNorm::x], &sums = args.inputs[SpanningNorm::sums];
    const Weight &weights = args.weights[SpanningNorm::weight], &biases = args.weights[SpanningNorm::bias];
    const int64_t group = args.ints[SpanningNorm::group], num_groups = args.ints[SpanningNorm::num_groups];
    const Range mine = share(x.rows * num_groups, worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const Range columns = columns_of_group(i % num_groups, group, args.ints[SpanningNorm::begin], x.cols);
        if (columns.end <= columns.begin) continue;
        const int64_t at = i / num_groups * x.cols + columns.begin;
        const float squares = args.inputs[SpanningNorm::squares].data[i] / static_cast<float>(group);
        const F32x16 inverse = broadcast(1.0f / __builtin_sqrtf(squares + args.floats[SpanningNorm::eps]));
        const F32x16 center = broadcast(sums.data ? sums.data[i] / static_cast<float>(group) : 0.0f);
        const float* const weight = weights.data ? weights.data + columns.begin : nullptr;
        const float* const bias = biases.data ? biases.data + columns.begin : nullptr;
        map_columns(args.output.data + at, x.data + at, columns.end - columns.begin, [&](F32x16 v, auto read) {
            F32x16 normed = (v - center) * inverse;
            if (weight) normed = normed * read(weight);
            return bias ? normed + read(bias) : normed;
        });
    }
}

// Whether the groups contain the columns [begin, begin + x.cols).
bool is_span(const Args& args, int group, int begin, int num_groups, const View& x) {
    const int64_t all = args.ints[group] * args.ints[num_groups];
    return args.ints[group] > 0 && args.ints[num_groups] > 0 && x.cols > 0 &&
           is_within(args.ints[begin], 0, all - x.cols);
}

bool group_sums_fits(const Args& args) {
    const View &x = args.inputs[GroupSums::x], &sums = args.inputs[GroupSums::sums];
    return is_span(args, GroupSums::group, GroupSums::begin, GroupSums::num_groups, x) &&
           is_within(args.ints[GroupSums::power], 1, 2) && (is_absent(sums) || is_like(sums, args.output)) &&
           has_rows_of(x, args.output) && has_cols(args.output, args.ints[GroupSums::num_groups]);
}

bool spanning_norm_fits(const Args& args) {
    const View &x = args.inputs[SpanningNorm::x], &sums = args.inputs[SpanningNorm::sums];
    const View& squares = args.inputs[SpanningNorm::squares];
    return is_span(args, SpanningNorm::group, SpanningNorm::begin, SpanningNorm::num_groups, x) &&
           has_rows_of(x, squares) && has_cols(squares, args.ints[SpanningNorm::num_groups]) &&
           (is_absent(sums) || is_like(sums, squares)) && is_like(x, args.output) &&
           is_vector_or_absent(args.weights[SpanningNorm::weight], x.cols) &&
           is_vector_or_absent(args.weights[SpanningNorm::bias], x.cols);
}

}  // namespace
OCTAVO_KERNEL(group_sums, GroupSums);
OCTAVO_KERNEL(spanning_norm, SpanningNorm);
}  // namespace octavo
