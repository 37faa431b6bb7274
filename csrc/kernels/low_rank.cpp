// AddLowRank adds to each row of a product the low-rank product of its adapter. AdapterSlots gives each token's slot.
//
// Up to ROWS consecutive rows with the same adapter go through the factors together. An output is the sum of the same
// terms in the same order whatever rows lie beside its own, and whichever worker computes it.
#include "activations.h"
#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(AdapterSlots, (), (), (index), ());
OCTAVO_SIGNATURE_WITH_TUPLES(AddLowRank, (y, x, slots), (norm), (heads, num_slots, max_rank, is_head, kind), (eps),
                             (weights));

constexpr int32_t ROWS = 4;    // that go through the factors together
constexpr int32_t PANELS = 4;  // of output columns that a worker takes at once
constexpr int32_t LANES = 16;

void adapter_slots(const Args& args, const Step& step, Worker& worker) {
    if (worker.index > 0) return;
    const int32_t* const slots = step.index(args.ints[AdapterSlots::index]);
    for (int32_t r = 0; r < args.output.rows; ++r) args.output.data[r] = slots ? static_cast<float>(slots[r]) : -1.0f;
}

bool adapter_slots_fits(const Args& args) { return has_cols(args.output, 1); }

// The sizes of a record, and the inner numbers, which its first half computes and its second half reads.
struct LowRankWork {
    const Args& args;
    const View &y, &x, &slots;
    int32_t count;  // weights
    int64_t heads;
    int64_t max_width;  // inner numbers of a row for one weight
    float* inner;       // [rows, count, max_width]

    explicit LowRankWork(const Args& a)
        : args(a),
          y(a.inputs[AddLowRank::y]),
          x(a.inputs[AddLowRank::x]),
          slots(a.inputs[AddLowRank::slots]),
          count(a.tuple_length),
          heads(a.ints[AddLowRank::heads]),
          max_width(heads * a.ints[AddLowRank::max_rank]),
          inner(static_cast<float*>(a.shared_scratch)) {}
    int64_t cols_of(int32_t weight) const { return args.tuples[weight].packed->n; }
    float* inner_of(int64_t row, int32_t weight) const { return inner + (row * count + weight) * max_width; }
};

// Rows [first, first + rows) with the same adapter. parts: of its weights; null: none.
struct RowsOfAdapter {
    int64_t first = 0;
    int32_t rows = 0;
    const LowRank* parts = nullptr;
};

inline bool next_rows(const LowRankWork& work, RowsOfAdapter& rows) {
    rows.first += rows.rows;
    const int64_t left = work.args.output.rows - rows.first;
    if (left <= 0) return false;
    const float* const slots = work.slots.data + rows.first;
    rows.rows = 1;
    while (rows.rows < ROWS && rows.rows < left && slots[rows.rows] == slots[0]) ++rows.rows;
    const int64_t slot = static_cast<int64_t>(slots[0]);
    rows.parts = slot < 0 ? nullptr : work.args.low_ranks + slot * work.count;
    return true;
}

// inner [R][J] = scale * x [R][n] * (rows of a)[J]; padded with zeros, a row of a has whole lanes.
template <int R, int J>
inline void shrink(const uint16_t* a, int64_t stride, const float* x, int64_t x_stride, int64_t n, float scale,
                   float* inner, int64_t inner_stride) {
    F32x16 sums[R * J];
    for (int i = 0; i < R * J; ++i) sums[i] = broadcast(0.0f);
    const auto add = [&](int64_t k, auto read) {
        F32x16 w[J];
        for (int j = 0; j < J; ++j) w[j] = load_f16(a + j * stride + k);
        for (int r = 0; r < R; ++r) {
            const F32x16 v = read(x + r * x_stride + k);
            for (int j = 0; j < J; ++j) sums[r * J + j] = fma(w[j], v, sums[r * J + j]);
        }
    };
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) add(k, [](const float* p) { return load(p); });
    const int tail = static_cast<int>(n - k);
    if (tail > 0) add(k, [tail](const float* p) { return load_partial(p, tail); });
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < J; ++j) inner[r * inner_stride + j] = scale * reduce_add(sums[r * J + j]);
}

template <int J>
inline void shrink_rows(int32_t rows, const uint16_t* a, int64_t stride, const float* x, int64_t x_stride, int64_t n,
                        float scale, float* inner, int64_t inner_stride) {
    switch (rows) {
        case 1:
            return shrink<1, J>(a, stride, x, x_stride, n, scale, inner, inner_stride);
        case 2:
            return shrink<2, J>(a, stride, x, x_stride, n, scale, inner, inner_stride);
        case 3:
            return shrink<3, J>(a, stride, x, x_stride, n, scale, inner, inner_stride);
        default:
            return shrink<4, J>(a, stride, x, x_stride, n, scale, inner, inner_stride);
    }
}

// The rows of A of an adapter, all weights together.
inline int64_t inner_rows(const LowRankWork& work, const LowRank* parts) {
    int64_t sum = 0;
    for (int32_t w = 0; w < work.count; ++w)
        if (parts[w].a) sum += work.heads * parts[w].rank;
    return sum;
}

// x of these rows as the products read it: normalized in the worker's scratch, or as it is.
inline const float* read_rows(const LowRankWork& work, const RowsOfAdapter& rows, const Worker& worker) {
    const float* const x = work.x.data + rows.first * work.x.cols;
    const Weight& norm = work.args.weights[AddLowRank::norm];
    if (!norm.data) return x;
    float* const normed = static_cast<float*>(worker.scratch);
    for (int32_t r = 0; r < rows.rows; ++r)
        rms_norm_group(normed + static_cast<int64_t>(r) * work.x.cols, x + static_cast<int64_t>(r) * work.x.cols,
                       norm.data, work.x.cols, work.args.floats[AddLowRank::eps]);
    return normed;
}

// The rows [begin, end) of A, numbered through all weights.
inline void shrink_part(const LowRankWork& work, const RowsOfAdapter& rows, int64_t begin, int64_t end,
                        const float* x) {
    const int64_t width = work.x.cols / work.heads, stride = (width + LANES - 1) / LANES * LANES;
    int64_t before = 0;
    for (int32_t w = 0; w < work.count; ++w) {
        const LowRank& part = rows.parts[w];
        if (!part.a) continue;
        const int64_t all = work.heads * part.rank, last = end - before < all ? end - before : all;
        for (int64_t j = begin > before ? begin - before : 0; j < last;) {
            const int64_t head = j / part.rank;
            const bool two = j + 1 < last && (j + 1) / part.rank == head;
            const uint16_t* const a = part.a + j * stride;
            float* const inner = work.inner_of(rows.first, w) + j;
            const int64_t inner_stride = work.count * work.max_width;
            const float* const from = x + head * width;
            if (two)
                shrink_rows<2>(rows.rows, a, stride, from, work.x.cols, width, part.scale, inner, inner_stride);
            else
                shrink_rows<1>(rows.rows, a, stride, from, work.x.cols, width, part.scale, inner, inner_stride);
            j += two ? 2 : 1;
        }
        before += all;
    }
}

void shrink_all(const LowRankWork& work, const Worker& worker) {
    int64_t total = 0;
    for (RowsOfAdapter rows; next_rows(work, rows);)
        if (rows.parts) total += inner_rows(work, rows.parts);
    const Range own = share(total, worker);
    int64_t before = 0;
    for (RowsOfAdapter rows; before < own.end && next_rows(work, rows);) {
        const int64_t count = rows.parts ? inner_rows(work, rows.parts) : 0;
        if (count > 0 && own.begin < before + count) {
            const int64_t begin = own.begin > before ? own.begin - before : 0;
            shrink_part(work, rows, begin, own.end - before < count ? own.end - before : count,
                        read_rows(work, rows, worker));
        }
        before += count;
    }
}

// sums [R] = inner [R][rank] * a panel of B.
template <int R>
inline void expand(const uint16_t* panel, int32_t rank, const float* inner, int64_t stride, F32x16* sums) {
    for (int r = 0; r < R; ++r) sums[r] = broadcast(0.0f);
    for (int32_t j = 0; j < rank; ++j) {
        const F32x16 w = load_f16(panel + static_cast<int64_t>(j) * LANES);
        for (int r = 0; r < R; ++r) sums[r] = fma(w, broadcast(inner[r * stride + j]), sums[r]);
    }
}

// The sums that the adapter of these rows adds to a panel of columns of a weight.
inline void expand_panel(const LowRankWork& work, const RowsOfAdapter& rows, int32_t weight, int64_t panel,
                         F32x16* sums) {
    const LowRank* const part = rows.parts ? rows.parts + weight : nullptr;
    if (!part || !part->b) {
        for (int32_t r = 0; r < rows.rows; ++r) sums[r] = broadcast(0.0f);
        return;
    }
    const int64_t head = work.heads == 1 ? 0 : panel * LANES / (work.cols_of(weight) / work.heads);
    const float* const inner = work.inner_of(rows.first, weight) + head * part->rank;
    const uint16_t* const b = part->b + panel * part->rank * LANES;
    const int64_t stride = work.count * work.max_width;
    switch (rows.rows) {
        case 1:
            return expand<1>(b, part->rank, inner, stride, sums);
        case 2:
            return expand<2>(b, part->rank, inner, stride, sums);
        case 3:
            return expand<3>(b, part->rank, inner, stride, sums);
        default:
            return expand<4>(b, part->rank, inner, stride, sums);
    }
}

// The lanes of a panel; the last panel may have fewer.
inline F32x16 read_lanes(const float* p, int lanes) { return lanes == LANES ? load(p) : load_partial(p, lanes); }
inline void write_lanes(float* p, F32x16 v, int lanes) {
    if (lanes == LANES)
        store(p, v);
    else
        store_partial(p, v, lanes);
}
inline int lanes_of(int64_t cols, int64_t panel) {
    return static_cast<int>(cols - panel * LANES < LANES ? cols - panel * LANES : LANES);
}

// Columns of one weight: y plus what the adapters add.
inline void add_panel(const LowRankWork& work, const RowsOfAdapter& rows, int32_t weight, int64_t column,
                      int64_t panel) {
    F32x16 sums[ROWS];
    expand_panel(work, rows, weight, panel, sums);
    const int lanes = lanes_of(work.cols_of(weight), panel);
    for (int32_t r = 0; r < rows.rows; ++r) {
        const int64_t at = (rows.first + r) * work.y.cols + column + panel * LANES;
        write_lanes(work.args.output.data + at, read_lanes(work.y.data + at, lanes) + sums[r], lanes);
    }
}

// The same columns of gate and up, and the activation.
template <typename F>
inline void activate_panel(const LowRankWork& work, const RowsOfAdapter& rows, int64_t panel, F function) {
    F32x16 gate[ROWS], up[ROWS];
    expand_panel(work, rows, 0, panel, gate);
    expand_panel(work, rows, 1, panel, up);
    const int64_t half = work.cols_of(0);
    const int lanes = lanes_of(half, panel);
    for (int32_t r = 0; r < rows.rows; ++r) {
        const float* const y = work.y.data + (rows.first + r) * work.y.cols + panel * LANES;
        const F32x16 g = read_lanes(y, lanes) + gate[r], u = read_lanes(y + half, lanes) + up[r];
        write_lanes(work.args.output.data + (rows.first + r) * half + panel * LANES, function(g) * u, lanes);
    }
}

// Calls `f(rows, unit)` for this worker's share of the units of all rows.
template <typename F>
inline void each_unit(const LowRankWork& work, const Worker& worker, int64_t units, bool skips, F f) {
    int64_t total = 0;
    for (RowsOfAdapter rows; next_rows(work, rows);) total += skips && !rows.parts ? 0 : units;
    const Range own = share(total, worker);
    int64_t before = 0;
    for (RowsOfAdapter rows; before < own.end && next_rows(work, rows);) {
        if (skips && !rows.parts) continue;
        for (int64_t unit = own.begin > before ? own.begin - before : 0; unit < units && before + unit < own.end;
             ++unit)
            f(rows, unit);
        before += units;
    }
}

inline int64_t units_of(int64_t cols) { return (cols + LANES * PANELS - 1) / (LANES * PANELS); }

void expand_all(const LowRankWork& work, const Worker& worker) {
    const int64_t kind = work.args.ints[AddLowRank::kind];
    const auto each_panel = [](int64_t cols, int64_t unit, auto f) {
        const int64_t panels = (cols + LANES - 1) / LANES, begin = unit * PANELS;
        for (int64_t p = begin; p < panels && p < begin + PANELS; ++p) f(p);
    };
    if (kind != KIND_NONE) {
        const int64_t half = work.cols_of(0);
        with_activation(kind, [&](auto function) {
            each_unit(work, worker, units_of(half), false, [&](const RowsOfAdapter& rows, int64_t unit) {
                each_panel(half, unit, [&](int64_t p) { activate_panel(work, rows, p, function); });
            });
        });
        return;
    }
    int64_t units = 0;
    for (int32_t w = 0; w < work.count; ++w) units += units_of(work.cols_of(w));
    const bool in_place = work.args.output.data == work.y.data;
    each_unit(work, worker, units, in_place, [&](const RowsOfAdapter& rows, int64_t unit) {
        int64_t column = 0;
        for (int32_t w = 0; w < work.count; ++w) {
            const int64_t cols = work.cols_of(w), own = units_of(cols);
            if (unit < own) {
                if (in_place && !rows.parts[w].b) return;
                return each_panel(cols, unit, [&](int64_t p) { add_panel(work, rows, w, column, p); });
            }
            unit -= own;
            column += cols;
        }
    });
}

void add_low_rank(const Args& args, const Step&, Worker& worker) {
    const LowRankWork work(args);
    shrink_all(work, worker);
    worker.barrier();
    expand_all(work, worker);
}

ScratchSizes add_low_rank_scratch(const Args& largest, const Step&, int32_t) {
    const LowRankWork work(largest);
    const size_t normed = largest.weights[AddLowRank::norm].data ? static_cast<size_t>(ROWS) * work.x.cols : 0;
    return {normed * sizeof(float), static_cast<size_t>(work.y.rows) * work.count * work.max_width * sizeof(float)};
}

bool add_low_rank_fits(const Args& args) {
    const LowRankWork work(args);
    int64_t cols = 0;
    for (int32_t w = 0; w < work.count; ++w) {
        const PackedWeight* const weight = args.tuples[w].packed;
        if (!weight || work.heads < 1 || weight->k * work.heads != work.x.cols) return false;
        if (work.heads > 1 && (work.count != 1 || weight->n % (work.heads * LANES) != 0)) return false;
        cols += weight->n;
    }
    const int64_t kind = args.ints[AddLowRank::kind];
    if (kind != KIND_NONE && (work.count != 2 || !is_activation(kind) || work.cols_of(0) * 2 != cols)) return false;
    return work.count > 0 && args.low_ranks && is_within(args.ints[AddLowRank::num_slots], 1, 1 << 16) &&
           is_within(args.ints[AddLowRank::max_rank], 1, 1 << 16) && has_cols(work.y, cols) &&
           has_cols(args.output, kind == KIND_NONE ? cols : cols / 2) && has_rows_of(work.y, args.output) &&
           has_cols(work.slots, 1) && has_rows_of(work.x, work.slots) && work.x.rows >= work.y.rows &&
           is_vector_or_absent(args.weights[AddLowRank::norm], work.x.cols);
}

}  // namespace
OCTAVO_KERNEL(adapter_slots, AdapterSlots);
OCTAVO_KERNEL_WITH_SCRATCH(add_low_rank, AddLowRank, add_low_rank_scratch);
}  // namespace octavo
