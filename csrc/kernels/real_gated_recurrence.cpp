#include "recurrence.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(RealGatedRecurrence, (x, input_gate, decay_gate), (slope, input_bias, decay_bias), (index),
                 (sharpness));

inline F32x16 root(F32x16 x) {
    float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) lane = __builtin_sqrtf(lane);
    return load(lanes);
}

void real_gated_recurrence(const Args& args, const Step& step, Worker& worker) {
    using Rule = RealGatedRecurrence;
    const View &x = args.inputs[Rule::x], &out = args.output;
    const View &input_gate = args.inputs[Rule::input_gate], &decay_gate = args.inputs[Rule::decay_gate];
    const HeadState shape{1, 1, x.cols};
    for_each_block(shape, args, step, worker,
                   [&](int64_t, int64_t begin, int64_t end, int64_t first, int count, float* state) {
                       for (int64_t index = begin; index < end; ++index) {
                           const ColumnRange columns = shape.columns(index);
                           const auto read = [&](int weight) { return columns.read(args.weights[weight].data); };
                           const F32x16 slope = broadcast(-args.floats[Rule::sharpness]) * read(Rule::slope);
                           const F32x16 input_bias = read(Rule::input_bias), decay_bias = read(Rule::decay_bias);
                           F32x16 sum = columns.read(state);
                           for (int64_t row = first; row < first + count; ++row) {
                               const int64_t at = row * x.cols;
                               const F32x16 rate = slope * sigmoid(columns.read(decay_gate.data + at) + decay_bias);
                               const F32x16 gated =
                                   columns.read(x.data + at) * sigmoid(columns.read(input_gate.data + at) + input_bias);
                               const F32x16 one = broadcast(1.0f);
                               const F32x16 size = step.positions[row] == 0 ? one : root(one - exp(rate + rate));
                               sum = fma(exp(rate), sum, size * gated);
                               columns.write(out.data + at, sum);
                           }
                           columns.write(state, sum);
                       }
                   });
}

bool real_gated_recurrence_fits(const Args& args) {
    using Rule = RealGatedRecurrence;
    const View& x = args.inputs[Rule::x];
    return is_like(args.inputs[Rule::input_gate], x) && is_like(args.inputs[Rule::decay_gate], x) &&
           is_like(args.output, x) && is_vector(args.weights[Rule::slope], x.cols) &&
           is_vector(args.weights[Rule::input_bias], x.cols) && is_vector(args.weights[Rule::decay_bias], x.cols);
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(real_gated_recurrence, RealGatedRecurrence);
}  // namespace octavo
