// Operations on several streams of a hidden state, stored side by side in the columns of one value: MixStreams,
// AddToStreams, MatchMagnitude; and Columns and SideBySide, which split and join such values.
#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Columns, (x), (), (begin, count), ());
OCTAVO_SIGNATURE(SideBySide, (a, b), (), (), ());
OCTAVO_SIGNATURE(MixStreams, (x, coefficients), (), (), ());
OCTAVO_SIGNATURE(AddToStreams, (x, y, coefficients), (offsets), (), ());
OCTAVO_SIGNATURE(MatchMagnitude, (x, target), (), (), (floor));

inline void copy(float* to, const float* from, int64_t count) { __builtin_memcpy(to, from, sizeof(float) * count); }

void columns(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[Columns::x];
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        copy(args.output.data + r * args.output.cols, x.data + r * x.cols + args.ints[Columns::begin],
             args.output.cols);
}

void side_by_side(const Args& args, const Step&, Worker& worker) {
    const View &a = args.inputs[SideBySide::a], &b = args.inputs[SideBySide::b];
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        float* const out = args.output.data + r * args.output.cols;
        copy(out, a.data + r * a.cols, a.cols);
        copy(out + a.cols, b.data + r * b.cols, b.cols);
    }
}

// The integer square root of the number of coefficients in a row. There are few streams, so a linear search will do.
inline int32_t root(int32_t square) {
    int32_t n = 1;
    while (n * n < square) ++n;
    return n;
}

void mix_streams(const Args& args, const Step&, Worker& worker) {
    const View &x = args.inputs[MixStreams::x], &coefficients = args.inputs[MixStreams::coefficients];
    const int32_t streams = root(coefficients.cols), width = x.cols / streams;
    const Range parts = share(static_cast<int64_t>(args.output.rows) * streams, worker);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
        const int64_t row = part / streams, stream = part % streams;
        const float* const from = x.data + row * x.cols;
        const float* const c = coefficients.data + row * coefficients.cols + stream * streams;
        float* const out = args.output.data + row * x.cols + stream * width;
        map_columns(out, from + stream * width, width, [&](F32x16 sum, auto read) {
            for (int32_t j = 0; j < streams; ++j)
                sum = fma(broadcast(c[j]), read(from + static_cast<int64_t>(j) * width), sum);
            return sum;
        });
    }
}

void add_to_streams(const Args& args, const Step&, Worker& worker) {
    const View &x = args.inputs[AddToStreams::x], &y = args.inputs[AddToStreams::y];
    const View& coefficients = args.inputs[AddToStreams::coefficients];
    const Weight& offsets = args.weights[AddToStreams::offsets];
    const int64_t streams = offsets.size, width = y.cols;
    const Range parts = share(args.output.rows * streams, worker);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
        const int64_t row = part / streams, stream = part % streams;
        const float own = coefficients.data ? coefficients.data[row * coefficients.cols + stream] : 0.0f;
        const F32x16 factor = broadcast(own + offsets.data[stream]);
        const float* const added = y.data + row * width;
        map_columns(args.output.data + part * width, x.data + part * width, width,
                    [&](F32x16 v, auto read) { return fma(factor, read(added), v); });
    }
}

void match_magnitude(const Args& args, const Step&, Worker& worker) {
    const View &x = args.inputs[MatchMagnitude::x], &target = args.inputs[MatchMagnitude::target];
    const int64_t width = target.cols, streams = x.cols / width;
    const float floor = args.floats[MatchMagnitude::floor];
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float n = static_cast<float>(width);
        const float wanted = __builtin_sqrtf(sum_of_squares(target.data + r * width, width) / n);
        for (int64_t i = r * streams; i < (r + 1) * streams; ++i) {
            const float own = sum_of_squares(x.data + i * width, width) / n;
            const F32x16 factor = broadcast(wanted / __builtin_sqrtf(own > floor ? own : floor));
            map_columns(args.output.data + i * width, x.data + i * width, width,
                        [factor](F32x16 v, auto) { return v * factor; });
        }
    }
}

bool columns_fits(const Args& args) {
    const View& x = args.inputs[Columns::x];
    const int64_t begin = args.ints[Columns::begin], count = args.ints[Columns::count];
    return is_within(begin, 0, x.cols) && is_within(count, 1, x.cols - begin) && has_cols(args.output, count) &&
           has_rows_of(x, args.output);
}

bool side_by_side_fits(const Args& args) {
    const View &a = args.inputs[SideBySide::a], &b = args.inputs[SideBySide::b];
    return !is_absent(a) && !is_absent(b) && has_rows_of(a, args.output) && has_rows_of(b, args.output) &&
           has_cols(args.output, static_cast<int64_t>(a.cols) + b.cols);
}

bool mix_streams_fits(const Args& args) {
    const View &x = args.inputs[MixStreams::x], &coefficients = args.inputs[MixStreams::coefficients];
    const int64_t streams = root(coefficients.cols);
    return has_cols(coefficients, streams * streams) && x.cols % streams == 0 && has_rows_of(coefficients, x) &&
           is_like(x, args.output);
}

bool add_to_streams_fits(const Args& args) {
    const View &x = args.inputs[AddToStreams::x], &y = args.inputs[AddToStreams::y];
    const View& coefficients = args.inputs[AddToStreams::coefficients];
    const Weight& offsets = args.weights[AddToStreams::offsets];
    return is_vector(offsets, offsets.size) && has_cols(x, offsets.size * y.cols) && has_rows_of(x, y) &&
           is_like(x, args.output) &&
           (is_absent(coefficients) || (has_cols(coefficients, offsets.size) && has_rows_of(coefficients, x)));
}

bool match_magnitude_fits(const Args& args) {
    const View &x = args.inputs[MatchMagnitude::x], &target = args.inputs[MatchMagnitude::target];
    return target.cols > 0 && x.cols % target.cols == 0 && has_rows_of(x, target) && is_like(x, args.output);
}

}  // namespace
OCTAVO_KERNEL(columns, Columns);
OCTAVO_KERNEL(side_by_side, SideBySide);
OCTAVO_KERNEL(mix_streams, MixStreams);
OCTAVO_KERNEL(add_to_streams, AddToStreams);
OCTAVO_KERNEL(match_magnitude, MatchMagnitude);
}  // namespace octavo
