// Rope: rotates the heads of each row by its position.
#include "rope.h"

#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Rope, (x), (frequencies, axes), (head_dim), (attention_factor));

RopeTable rope_of(const Args& args) {
    const Weight& frequencies = args.weights[Rope::frequencies];
    return {frequencies.data, static_cast<int32_t>(frequencies.size), args.floats[Rope::attention_factor],
            args.weights[Rope::axes].data};
}

ScratchSizes rope_scratch(const Args& largest, const Step&, int32_t) {
    return {sizeof(float) * 2 * static_cast<size_t>(rope_of(largest).half), 0};
}

void rope(const Args& args, const Step& step, Worker& worker) {
    const RopeTable table = rope_of(args);
    const int32_t head_dim = static_cast<int32_t>(args.ints[Rope::head_dim]);
    const View &x = args.inputs[Rope::x], &out = args.output;
    float* cos_sin = static_cast<float*>(worker.scratch);
    const DomainRows rows = step.domain(x.domain);
    const int64_t end = static_cast<int64_t>(x.rows) * (worker.index + 1) / worker.count;
    for (int64_t t = static_cast<int64_t>(x.rows) * worker.index / worker.count; t < end; ++t) {
        compute_cos_sin(table, rows, t, cos_sin);
        for (int32_t column = 0; column < x.cols; column += head_dim)
            rotate_head(table, cos_sin, x.data + t * x.cols + column, out.data + t * out.cols + column, head_dim);
    }
}

bool rope_fits(const Args& args) {
    const int64_t head_dim = args.ints[Rope::head_dim];
    const View& x = args.inputs[Rope::x];
    return head_dim > 0 && x.cols % head_dim == 0 && is_like(x, args.output) &&
           is_within(args.weights[Rope::frequencies].size, 0, head_dim / 2) &&
           is_vector_or_absent(args.weights[Rope::axes], args.weights[Rope::frequencies].size);
}

}  // namespace

OCTAVO_KERNEL_WITH_SCRATCH(rope, Rope, rope_scratch);

}  // namespace octavo
