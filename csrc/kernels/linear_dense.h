// Products of panels of floats: float32, one fma per value in increasing k. Lanes are columns.
#pragma once

#include "linear_format.h"

namespace octavo {
namespace {

constexpr int DENSE_TILE_K = 128;
#if defined(__AVX512F__)
constexpr int DENSE_ROWS = 8;  // sums in registers: enough for two fma per cycle
#else
constexpr int DENSE_ROWS = 4;
#endif

// Activations of a dense product: rows of k floats.
struct DenseRows {
    const float* data;
    int64_t stride;
    int rows;
    bool of_encoder = false;  // many rows, so unpacking float16 for AMX pays off
};

template <typename F>
inline F32x16 load_dense(const uint8_t* panel, int64_t k) {
    if constexpr (F::codes == Codes::f32)
        return load(reinterpret_cast<const float*>(panel) + k * PANEL_COLS);
    else if constexpr (F::codes == Codes::f16)
        return load_f16(reinterpret_cast<const uint16_t*>(panel) + k * PANEL_COLS);
    else
        return load_bf16(reinterpret_cast<const uint16_t*>(panel) + k * PANEL_COLS);
}

// c [R][16] += x [R][k0 .. k0 + count) * weights
template <typename F, int R>
inline void multiply_dense_rows(const uint8_t* panel, int count, const float* x, int64_t stride, float* c) {
    F32x16 y[R];
    for (int r = 0; r < R; ++r) y[r] = load(c + PANEL_COLS * r);
    for (int k = 0; k < count; ++k) {
        const F32x16 w = load_dense<F>(panel, k);
        for (int r = 0; r < R; ++r) y[r] = fma(w, broadcast(x[r * stride + k]), y[r]);
    }
    for (int r = 0; r < R; ++r) store(c + PANEL_COLS * r, y[r]);
}

// As above, for x.rows rows, at most R.
template <typename F, int R>
inline void multiply_last_rows(const uint8_t* panel, int count, const DenseRows& x, float* c) {
    if constexpr (R > 0) {
        if (x.rows == R)
            multiply_dense_rows<F, R>(panel, count, x.data, x.stride, c);
        else
            multiply_last_rows<F, R - 1>(panel, count, x, c);
    }
}

template <typename F>
inline void multiply_dense(const uint8_t* panel, int count, DenseRows x, float* c) {
    for (; x.rows > DENSE_ROWS; x.rows -= DENSE_ROWS, x.data += DENSE_ROWS * x.stride, c += DENSE_ROWS * PANEL_COLS)
        multiply_dense_rows<F, DENSE_ROWS>(panel, count, x.data, x.stride, c);
    multiply_last_rows<F, DENSE_ROWS>(panel, count, x, c);
}

// c [rows][16] += x * panel. With many rows, the panel is converted to float32 once, in pieces that fit the L1 cache.
template <typename F>
void multiply_dense_panel(const uint8_t* panel, int k, DenseRows x, float* c) {
    if (F::codes == Codes::f32 || x.rows <= DENSE_ROWS) {
        for (int k0 = 0; k0 < k; k0 += DENSE_TILE_K) {
            const int count = k - k0 < DENSE_TILE_K ? k - k0 : DENSE_TILE_K;
            const uint8_t* const piece = panel + static_cast<int64_t>(k0) * (PANEL_COLS * F::bits / 8);
            multiply_dense<F>(piece, count, {x.data + k0, x.stride, x.rows}, c);
        }
        return;
    }
    alignas(64) float tile[DENSE_TILE_K * PANEL_COLS];
    for (int k0 = 0; k0 < k; k0 += DENSE_TILE_K) {
        const int count = k - k0 < DENSE_TILE_K ? k - k0 : DENSE_TILE_K;
        for (int i = 0; i < count; ++i) store(tile + i * PANEL_COLS, load_dense<F>(panel, k0 + i));
        multiply_dense<Format<Codes::f32, 32, 1, Scales::none, Mins::none>>(reinterpret_cast<uint8_t*>(tile), count,
                                                                            {x.data + k0, x.stride, x.rows}, c);
    }
}

}  // namespace
}  // namespace octavo
