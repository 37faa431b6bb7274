// Rows of the embedding matrix, dequantized from the packed panels that the output head shares.
#include "elementwise.h"
#include "linear_dense.h"
#include "linear_format.h"

namespace octavo {
namespace {

inline float lane(F32x16 v, int i) {
    float t[16];
    store(t, v);
    return t[i];
}

template <WeightType T>
void read_column(const uint8_t* panel, int column, int k, float* out) {
    UnitCursor<T> cursor(panel, 0, k / UNIT_K);
    for (int u = 0; u < k / UNIT_K; ++u, cursor.next(), out += UNIT_K) {
        const float scale = lane(cursor.scales(), column);
        for (int half = 0; half < 2; ++half) {
            // s * scale_j and m are exact, so the order is that of the file's definition.
            const float s = scale * static_cast<float>(half_scale<T>(cursor.header, cursor.unit, half, column));
            float m = 0.0f;
            if constexpr (Format<T>::mins > 0) m = lane(cursor.mins(half), column);
            for (int i = 16 * half; i < 16 * half + 16; ++i) {
                const float w = s * static_cast<float>(unit_code<T>(cursor.codes(), i, column) - Format<T>::zero);
                out[i] = Format<T>::mins > 0 ? w + m : w;
            }
        }
    }
}

template <WeightType T>
void read_dense_column(const uint8_t* panel, int column, int k, float* out) {
    for (int i = 0; i < k; ++i) out[i] = lane(load_dense<T>(panel, i), column);
}

void read_row(const PackedWeight& w, int32_t row, float* out) {
    const uint8_t* const panel = w.data + row / PANEL_COLS * w.panel_bytes;
    const int column = row % PANEL_COLS;
    switch (w.type) {
        case WeightType::F32:
            return read_dense_column<WeightType::F32>(panel, column, w.k, out);
        case WeightType::F16:
            return read_dense_column<WeightType::F16>(panel, column, w.k, out);
        case WeightType::BF16:
            return read_dense_column<WeightType::BF16>(panel, column, w.k, out);
        default:
            with_quantized_type(w.type, [&](auto tag) { read_column<decltype(tag)::type>(panel, column, w.k, out); });
    }
}

void embedding(const Args& args, const Step& step, Worker& worker) {
    const PackedWeight& w = *args.weights[0].packed;
    const Range rows = share(args.output.rows, worker);
    for (int64_t r = rows.begin; r < rows.end; ++r)
        read_row(w, step.token_ids[r], args.output.data + r * args.output.cols);
}

}  // namespace
OCTAVO_KERNEL(embedding);
}  // namespace octavo
