// Embedding, PositionEmbedding and TokenTypeEmbedding: rows of a matrix, dequantized from packed panels that the output
// head may share.
#include "elementwise.h"
#include "linear_dense.h"
#include "linear_format.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Embedding, (), (weight), (has_all, first, total), ());
OCTAVO_SIGNATURE(PositionEmbedding, (), (weight), (offset), ());
OCTAVO_SIGNATURE(TokenTypeEmbedding, (), (weight), (), ());

inline float lane(F32x16 v, int i) {
    float t[16];
    store(t, v);
    return t[i];
}

// order: the columns of `out` in the order of the codes, or null.
template <typename F>
void read_column(const Panel& panel, int column, int k, const int32_t* order, float* out) {
    UnitCursor<F> cursor(panel, 0, k / UNIT_K);
    for (int u = 0; u < k / UNIT_K; ++u, cursor.next()) {
        const float scale = lane(cursor.scales(), column);
        for (int half = 0; half < 2; ++half) {
            // s * scale_j and m are exact, so the order of operations matches the definition of the format.
            const float s = scale * static_cast<float>(half_scale<F>(cursor.half_scale_bytes(half), half, column));
            float m = 0.0f;
            if constexpr (F::mins > 0) m = lane(cursor.mins(half), column);
            for (int i = 16 * half; i < 16 * half + 16; ++i) {
                const int code = unit_code<F>(panel.type.table, cursor.codes(), i, column);
                const float w = s * static_cast<float>(code - panel.type.zero);
                out[order ? order[u * UNIT_K + i] : u * UNIT_K + i] = F::mins > 0 ? w + m : w;
            }
        }
    }
}

template <typename F>
void read_dense_column(const Panel& panel, int column, int k, float* out) {
    for (int i = 0; i < k; ++i) out[i] = lane(load_dense<F>(panel.data, i), column);
}

void read_row(const PackedWeight& w, int32_t row, float* out) {
    const Panel panel = {w.data + row / PANEL_COLS * w.panel_bytes, *w.type, w.groups};
    const int column = row % PANEL_COLS;
    with_format(w.type->traits, [&](auto format) {
        using F = decltype(format);
        if constexpr (F::is_dense)
            read_dense_column<F>(panel, column, w.k, out);
        else
            read_column<F>(panel, column, w.k, w.order, out);
    });
}

// indices: the row of each token, plus `offset`.
void read_rows(const PackedWeight& w, const int32_t* indices, int32_t offset, const View& out, const Worker& worker) {
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) read_row(w, indices[r] + offset, out.data + r * out.cols);
}

// A complete table covers all ids of a step. In a partial table, ids of other parts give zeros.
void embedding(const Args& args, const Step& step, Worker& worker) {
    const PackedWeight& weight = *args.weights[Embedding::weight].packed;
    const View& out = args.output;
    const int64_t first = args.ints[Embedding::first], total = args.ints[Embedding::total];
    const Range rows = share(out.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t id = step.token_ids[r], row = (id < (total ? total : weight.n) ? id : 0) - first;
        if (row >= 0 && row < weight.n)
            read_row(weight, static_cast<int32_t>(row), out.data + r * out.cols);
        else
            __builtin_memset(out.data + r * out.cols, 0, sizeof(float) * out.cols);
    }
}

void position_embedding(const Args& args, const Step& step, Worker& worker) {
    const int32_t offset = static_cast<int32_t>(args.ints[PositionEmbedding::offset]);
    read_rows(*args.weights[PositionEmbedding::weight].packed, step.positions, offset, args.output, worker);
}

void token_type_embedding(const Args& args, const Step& step, Worker& worker) {
    const PackedWeight& weight = *args.weights[TokenTypeEmbedding::weight].packed;
    if (step.token_types) return read_rows(weight, step.token_types, 0, args.output, worker);
    const View& out = args.output;
    const Range rows = share(out.rows, worker);
    if (rows.begin == rows.end) return;
    float* const first = out.data + rows.begin * out.cols;
    read_row(weight, 0, first);
    for (int64_t r = rows.begin + 1; r < rows.end; ++r)
        __builtin_memcpy(out.data + r * out.cols, first, sizeof(float) * out.cols);
}

bool embedding_fits(const Args& args) {
    const PackedWeight* const table = args.weights[Embedding::weight].packed;
    const int64_t first = args.ints[Embedding::first], total = args.ints[Embedding::total];
    return table && has_cols(args.output, table->k) && first >= 0 &&
           (total == 0 ? first == 0 : total >= first + table->n);
}

bool position_embedding_fits(const Args& args) {
    const PackedWeight* const table = args.weights[PositionEmbedding::weight].packed;
    return table && has_cols(args.output, table->k) && is_within(args.ints[PositionEmbedding::offset], 0, table->n - 1);
}

bool token_type_embedding_fits(const Args& args) {
    const PackedWeight* const table = args.weights[TokenTypeEmbedding::weight].packed;
    return table && has_cols(args.output, table->k);
}

}  // namespace
OCTAVO_KERNEL(embedding, Embedding);
OCTAVO_KERNEL(position_embedding, PositionEmbedding);
OCTAVO_KERNEL(token_type_embedding, TokenTypeEmbedding);
}  // namespace octavo
