#include "recurrence.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(SelectiveScan, (xbc, dt), (decay, skip, dt_bias), (num_heads, head_dim, num_groups, state_dim, index),
                 ());

// Processes one token in one tile. added: the row added to the state times b.
inline F32x16 scan_step(float* tile, int lanes, const float* b, const float* c, int64_t state_dim, F32x16 added,
                        F32x16 gate) {
    const ColumnRange columns{0, lanes};
    const F32x16 zero = broadcast(0.0f);
    F32x16 out[4] = {zero, zero, zero, zero};
    for (int64_t i = 0; i < state_dim; ++i) {
        float* const row = tile + i * lanes;
        const F32x16 state = fma(broadcast(b[i]), added, columns.read(row) * gate);
        columns.write(row, state);
        out[i % 4] = fma(state, broadcast(c[i]), out[i % 4]);
    }
    return (out[0] + out[1]) + (out[2] + out[3]);
}

void selective_scan(const Args& args, const Step& step, Worker& worker) {
    const View &xbc = args.inputs[SelectiveScan::xbc], &out = args.output;
    const int64_t heads = args.ints[SelectiveScan::num_heads], head_dim = args.ints[SelectiveScan::head_dim];
    const int64_t groups = args.ints[SelectiveScan::num_groups], state_dim = args.ints[SelectiveScan::state_dim];
    const HeadState shape{heads, state_dim, head_dim};
    for_each_block(shape, args, step, worker,
                   [&](int64_t head, int64_t begin, int64_t end, int64_t first, int count, float* state) {
                       const F32x16 dt = read_column(args.inputs[SelectiveScan::dt], first, count, head) +
                                         broadcast(args.weights[SelectiveScan::dt_bias].data[head]);
                       const F32x16 steps = softplus(dt);
                       float step_of[TOKEN_BLOCK], gate_of[TOKEN_BLOCK];
                       store(step_of, steps);
                       store(gate_of, exp(broadcast(args.weights[SelectiveScan::decay].data[head]) * steps));
                       const F32x16 skip = broadcast(args.weights[SelectiveScan::skip].data[head]);
                       const int64_t group = head / (heads / groups) * state_dim;
                       for (int64_t index = begin; index < end; ++index) {
                           const ColumnRange columns = shape.columns(index);
                           for (int t = 0; t < count; ++t) {
                               const float* const row = xbc.data + (first + t) * xbc.cols;
                               const float* const b = row + heads * head_dim + group;
                               const F32x16 x = columns.read(row + head * head_dim);
                               const F32x16 sum = scan_step(state + shape.offset(head, index), columns.lanes, b,
                                                            b + groups * state_dim, state_dim,
                                                            x * broadcast(step_of[t]), broadcast(gate_of[t]));
                               columns.write(out.data + (first + t) * out.cols + head * head_dim, fma(skip, x, sum));
                           }
                       }
                   });
}

bool selective_scan_fits(const Args& args) {
    const View &xbc = args.inputs[SelectiveScan::xbc], &dt = args.inputs[SelectiveScan::dt];
    const int64_t heads = args.ints[SelectiveScan::num_heads], head_dim = args.ints[SelectiveScan::head_dim];
    const int64_t groups = args.ints[SelectiveScan::num_groups], state_dim = args.ints[SelectiveScan::state_dim];
    return heads > 0 && groups > 0 && state_dim > 0 && heads % groups == 0 && has_cols(dt, heads) &&
           has_cols(xbc, heads * head_dim + 2 * groups * state_dim) && has_cols(args.output, heads * head_dim) &&
           has_rows_of(xbc, args.output) && has_rows_of(dt, xbc) &&
           is_vector(args.weights[SelectiveScan::decay], heads) &&
           is_vector(args.weights[SelectiveScan::skip], heads) &&
           is_vector(args.weights[SelectiveScan::dt_bias], heads);
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(selective_scan, SelectiveScan);
}  // namespace octavo
