#include "activations.h"
#include "elementwise.h"
#include "shapes.h"
#include "state.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(ShortConv, (x), (weight, bias), (index, kind), ());

constexpr int MAX_TAPS = 8;

// A sequence's state is the last taps - 1 rows of x, oldest first.
struct ConvWindow {
    F32x16 rows[MAX_TAPS - 1];
    int count;

    void read(const SequenceRows& sequence, ColumnRange columns, int64_t cols) {
        for (int j = 0; j < count; ++j)
            rows[j] = sequence.is_first ? broadcast(0.0f) : columns.read(sequence.state + j * cols);
    }
    void write(float* state, ColumnRange columns, int64_t cols) const {
        for (int j = 0; j < count; ++j) columns.write(state + j * cols, rows[j]);
    }
};

template <typename F>
inline void convolve_columns(const Args& args, const Step& step, ColumnRange columns, F function) {
    const View &x = args.inputs[ShortConv::x], &out = args.output;
    const Weight &weight = args.weights[ShortConv::weight], &bias = args.weights[ShortConv::bias];
    const int64_t cols = x.cols;
    const int taps = static_cast<int>(weight.size / cols);
    F32x16 factors[MAX_TAPS];
    for (int j = 0; j < taps; ++j) {
        float lanes[16] = {};
        for (int i = 0; i < columns.lanes; ++i) lanes[i] = weight.data[(columns.first + i) * taps + j];
        factors[j] = load(lanes);
    }
    const F32x16 addend = bias.data ? columns.read(bias.data) : broadcast(0.0f);
    ConvWindow window;
    window.count = taps - 1;
    for (int32_t request = 0; request < step.num_requests; ++request) {
        const SequenceRows rows = sequence_rows(*args.state, step, request);
        if (rows.begin == rows.end) continue;
        window.read(rows, columns, cols);
        for (int32_t t = rows.begin; t < rows.end; ++t) {
            const F32x16 newest = columns.read(x.data + t * cols);
            F32x16 sum = addend;
            for (int j = 0; j < window.count; ++j) sum = fma(window.rows[j], factors[j], sum);
            columns.write(out.data + t * cols, function(fma(newest, factors[window.count], sum)));
            for (int j = 1; j < window.count; ++j) window.rows[j - 1] = window.rows[j];
            window.rows[window.count - 1] = newest;
            if (float* saved = rows.saved(t + 1)) window.write(saved, columns, cols);
        }
        window.write(rows.state, columns, cols);
    }
}

void short_conv(const Args& args, const Step& step, Worker& worker) {
    const int64_t cols = args.inputs[ShortConv::x].cols;
    const Range chunks = share((cols + 15) / 16, worker);
    const int64_t kind = args.ints[ShortConv::kind];
    const auto convolve = [&](auto function) {
        for (int64_t i = chunks.begin; i < chunks.end; ++i)
            convolve_columns(args, step, {16 * i, static_cast<int>(cols - 16 * i < 16 ? cols - 16 * i : 16)}, function);
    };
    if (kind == KIND_NONE)
        convolve([](F32x16 v) { return v; });
    else
        with_activation(kind, convolve);
}

bool short_conv_fits(const Args& args) {
    const View& x = args.inputs[ShortConv::x];
    const Weight& weight = args.weights[ShortConv::weight];
    const int64_t taps = x.cols > 0 ? weight.size / x.cols : 0, kind = args.ints[ShortConv::kind];
    return is_like(x, args.output) && is_within(taps, 2, MAX_TAPS) && is_vector(weight, taps * x.cols) &&
           is_vector_or_absent(args.weights[ShortConv::bias], x.cols) && (kind == KIND_NONE || is_activation(kind));
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(short_conv, ShortConv);
}  // namespace octavo
