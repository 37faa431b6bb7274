#include "recurrence.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(ChannelScan, (x, dt, b, c), (decay, skip), (index), ());

// Processes one token in one tile. added: the row added to the state times b. decay: [state_dim, cols], all columns.
inline F32x16 channel_step(float* tile, ColumnRange columns, const View& decay, const float* b, const float* c,
                           F32x16 step, F32x16 added) {
    const ColumnRange own{0, columns.lanes};
    F32x16 out = broadcast(0.0f);
    for (int64_t i = 0; i < decay.rows; ++i) {
        float* const row = tile + i * columns.lanes;
        const F32x16 gate = exp(columns.read(decay.data + i * decay.cols) * step);
        const F32x16 state = fma(broadcast(b[i]), added, own.read(row) * gate);
        own.write(row, state);
        out = fma(state, broadcast(c[i]), out);
    }
    return out;
}

void channel_scan(const Args& args, const Step& step, Worker& worker) {
    const View &x = args.inputs[ChannelScan::x], &dt = args.inputs[ChannelScan::dt], &out = args.output;
    const View &b = args.inputs[ChannelScan::b], &c = args.inputs[ChannelScan::c];
    const HeadState shape{1, b.cols, x.cols};
    // Only read.
    const View decay{const_cast<float*>(args.weights[ChannelScan::decay].data), b.cols, x.cols};
    const float* const skip = args.weights[ChannelScan::skip].data;
    for_each_block(
        shape, args, step, worker, [&](int64_t, int64_t begin, int64_t end, int64_t first, int count, float* state) {
            for (int64_t index = begin; index < end; ++index) {
                const ColumnRange columns = shape.columns(index);
                for (int64_t t = first; t < first + count; ++t) {
                    const F32x16 row = columns.read(x.data + t * x.cols);
                    const F32x16 size = softplus(columns.read(dt.data + t * dt.cols));
                    const F32x16 sum = channel_step(state + shape.offset(0, index), columns, decay, b.data + t * b.cols,
                                                    c.data + t * c.cols, size, size * row);
                    columns.write(out.data + t * out.cols, fma(columns.read(skip), row, sum));
                }
            }
        });
}

bool channel_scan_fits(const Args& args) {
    const View &x = args.inputs[ChannelScan::x], &dt = args.inputs[ChannelScan::dt];
    const View &b = args.inputs[ChannelScan::b], &c = args.inputs[ChannelScan::c];
    return b.cols > 0 && is_like(dt, x) && is_like(args.output, x) && is_like(c, b) && has_rows_of(b, x) &&
           is_vector(args.weights[ChannelScan::decay], int64_t{b.cols} * x.cols) &&
           is_vector(args.weights[ChannelScan::skip], x.cols);
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(channel_scan, ChannelScan);
}  // namespace octavo
