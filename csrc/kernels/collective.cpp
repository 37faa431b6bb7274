// AllReduce and AllGather between the processes of a group, piece by piece through their shared memory (collective.h).
#include "elementwise.h"
#include "meeting.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(AllReduce, (x), (), (size), ());
OCTAVO_SIGNATURE(AllGather, (x), (), (size, cols, begin), ());

constexpr int64_t ONE_PHASE_FLOATS =
    1 << 14;  // per piece that every rank adds up by itself, if there are more than two ranks

inline void copy(float* to, const float* from, int64_t count, const Worker& worker) {
    const Range part = share(count, worker);
    __builtin_memcpy(to + part.begin, from + part.begin, sizeof(float) * (part.end - part.begin));
}

// out[i] = element begin + i summed over the ranks, in their order. `own` points to this rank's elements.
inline void add_ranks(const Exchange& e, uint32_t turn, int64_t begin, Range range, const float* own, float* out) {
    const float* parts[Exchange::MAX_RANKS];
    for (int32_t r = 0; r < e.size; ++r) parts[r] = r == e.rank ? own : numbers(e, r, turn) + begin;
    for (int64_t i = range.begin; i < range.end; i += 16) {
        const int n = range.end - i < 16 ? static_cast<int>(range.end - i) : 16;
        if (n == 16) {
            F32x16 total = load(parts[0] + i);
            for (int32_t r = 1; r < e.size; ++r) total = total + load(parts[r] + i);
            store(out + i, total);
        } else {
            F32x16 total = load_partial(parts[0] + i, n);
            for (int32_t r = 1; r < e.size; ++r) total = total + load_partial(parts[r] + i, n);
            store_partial(out + i, total, n);
        }
    }
}

void all_reduce(const Args& args, const Step&, Worker& worker) {
    Exchange& e = *static_cast<Exchange*>(args.shared_scratch);
    const float* const x = args.inputs[AllReduce::x].data;
    float* const out = args.output.data;
    const int64_t size = static_cast<int64_t>(args.output.rows) * args.output.cols;
    const int64_t most = static_cast<int64_t>(e.bytes / sizeof(float));
    uint32_t turn = e.turn;
    for (int64_t at = 0; at < size; at += most) {
        const int64_t count = size - at < most ? size - at : most;
        copy(numbers(e, e.rank, turn), x + at, count, worker);
        if (!meet(e, turn, worker, sizeof(float) * count)) return;
        if (e.size == 2 || count <= ONE_PHASE_FLOATS) {
            add_ranks(e, turn - 1, 0, share(count, worker), x + at, out + at);
            continue;
        }
        // Writes this rank's share of the elements, in whole lines of 16, to the other half.
        const auto border = [&](int64_t rank) {
            const int64_t b = (count * rank / e.size + 15) / 16 * 16;
            return b < count ? b : count;
        };
        const int64_t begin = border(e.rank), length = border(e.rank + 1) - begin;
        add_ranks(e, turn - 1, begin, share(length, worker), x + at + begin, numbers(e, e.rank, turn));
        if (!meet(e, turn, worker, sizeof(float) * length)) return;
        for (int32_t r = 0; r < e.size; ++r)
            copy(out + at + border(r), numbers(e, r, turn - 1), border(r + 1) - border(r), worker);
    }
}

void all_gather(const Args& args, const Step&, Worker& worker) {
    Exchange& e = *static_cast<Exchange*>(args.shared_scratch);
    const View &x = args.inputs[AllGather::x], &out = args.output;
    const int64_t row_bytes = static_cast<int64_t>(out.cols) * sizeof(float);
    const int64_t most = static_cast<int64_t>(e.bytes) / row_bytes;  // the same on all ranks
    uint32_t turn = e.turn;
    for (int64_t at = 0; at < out.rows; at += most) {
        const int64_t rows = out.rows - at < most ? out.rows - at : most;
        if (worker.index == 0) *reinterpret_cast<int64_t*>(e.half(e.rank, turn)) = x.cols;
        copy(numbers(e, e.rank, turn), x.data + at * x.cols, rows * x.cols, worker);
        if (!meet(e, turn, worker, sizeof(float) * rows * x.cols)) return;
        const Range mine = share(rows, worker);
        if (worker.index == 0)
            for (int32_t r = 0; r < e.size; ++r)
                e.columns[r] = static_cast<int32_t>(*reinterpret_cast<const int64_t*>(e.half(r, turn - 1)));
        int64_t column = 0;
        for (int32_t r = 0; r < e.size; ++r) {
            const int64_t cols = *reinterpret_cast<const int64_t*>(e.half(r, turn - 1));
            if (cols < 0 || cols > out.cols - column) break;  // the peer runs another program, so the data is invalid
            for (int64_t row = mine.begin; row < mine.end; ++row)
                __builtin_memcpy(out.data + (at + row) * out.cols + column, numbers(e, r, turn - 1) + row * cols,
                                 sizeof(float) * cols);
            column += cols;
        }
    }
}

bool all_reduce_fits(const Args& args) { return is_like(args.inputs[AllReduce::x], args.output); }

bool all_gather_fits(const Args& args) {
    const View& x = args.inputs[AllGather::x];
    const int64_t begin = args.ints[AllGather::begin];
    return has_cols(args.output, args.ints[AllGather::cols]) && is_within(begin, 0, args.output.cols) &&
           is_within(x.cols, 1, args.output.cols - begin) && has_rows_of(x, args.output);
}

}  // namespace
OCTAVO_KERNEL(all_reduce, AllReduce);
OCTAVO_KERNEL(all_gather, AllGather);
}  // namespace octavo
