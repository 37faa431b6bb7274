// The activation functions on 16 lanes. ACTIVATIONS in octavo/graph/ops/rowwise.py defines them.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

inline F32x16 sigmoid(F32x16 x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(broadcast(0.0f) - x)); }

// Uses an odd polynomial below 0.625 (Cephes tanhf), where 1 - 2 / (e^2x + 1) would cancel.
inline F32x16 tanh(F32x16 x) {
    const F32x16 limit = broadcast(0.625f), size = abs(x);
    const F32x16 small = max(broadcast(-0.625f), min(limit, x)), z = small * small;
    F32x16 p = broadcast(-5.70498872745e-3f);
    p = fma(p, z, broadcast(2.06390887954e-2f));
    p = fma(p, z, broadcast(-5.37397155531e-2f));
    p = fma(p, z, broadcast(1.33314422036e-1f));
    p = fma(p, z, broadcast(-3.33332819422e-1f));
    const F32x16 near_zero = fma(p * z, small, small);
    const F32x16 far = broadcast(1.0f) - broadcast(2.0f) / (exp(size + size) + broadcast(1.0f));
    const F32x16 signed_far = select_greater(broadcast(0.0f), x, broadcast(0.0f) - far, far);
    return select_greater(size, limit, signed_far, near_zero);
}

// x * Phi(x) through the complementary error function (Chebyshev fit, relative error 1.2e-7: Numerical Recipes 6.2).
inline F32x16 gelu(F32x16 x) {
    const F32x16 z = abs(x) * broadcast(0.70710678118654752f);
    const F32x16 t = broadcast(1.0f) / fma(broadcast(0.5f), z, broadcast(1.0f));
    F32x16 p = broadcast(0.17087277f);
    p = fma(p, t, broadcast(-0.82215223f));
    p = fma(p, t, broadcast(1.48851587f));
    p = fma(p, t, broadcast(-1.13520398f));
    p = fma(p, t, broadcast(0.27886807f));
    p = fma(p, t, broadcast(-0.18628806f));
    p = fma(p, t, broadcast(0.09678418f));
    p = fma(p, t, broadcast(0.37409196f));
    p = fma(p, t, broadcast(1.00002368f));
    p = fma(p, t, broadcast(-1.26551223f));
    const F32x16 upper = t * exp(p - z * z);
    const F32x16 twice_phi = select_greater(broadcast(0.0f), x, upper, broadcast(2.0f) - upper);
    return broadcast(0.5f) * x * twice_phi;
}

// 0.5 (1 + tanh u) is sigmoid(2u), without the cancellation.
inline F32x16 gelu_tanh(F32x16 x) {
    const F32x16 cubic = fma(x * x * broadcast(0.044715f), x, x);
    return x * sigmoid(cubic * broadcast(1.5957691216057308f));  // 2 sqrt(2 / pi)
}

inline F32x16 quick_gelu(F32x16 x) { return x * sigmoid(x * broadcast(1.702f)); }

// The part of xIELU below zero, e^x - 1 - x, whose Taylor series does not cancel near zero; zero above it.
inline F32x16 below_zero(F32x16 x) {
    const F32x16 z = min(broadcast(0.0f), x);
    F32x16 p = broadcast(1.0f / 40320.0f);
    p = fma(p, z, broadcast(1.0f / 5040.0f));
    p = fma(p, z, broadcast(1.0f / 720.0f));
    p = fma(p, z, broadcast(1.0f / 120.0f));
    p = fma(p, z, broadcast(1.0f / 24.0f));
    p = fma(p, z, broadcast(1.0f / 6.0f));
    p = fma(p, z, broadcast(0.5f));
    return select_greater(z, broadcast(-0.5f), p * z * z, exp(z) - broadcast(1.0f) - z);
}

// max keeps a NaN in its second operand.
inline F32x16 relu(F32x16 x) { return max(broadcast(0.0f), x); }

// Calls f with the lane function of `kind`: one loop per kind, without branches inside.
template <typename F>
inline void with_activation(int64_t kind, F f) {
    switch (kind) {
        case KIND_SILU:
            return f([](F32x16 x) { return x * sigmoid(x); });
        case KIND_GELU:
            return f([](F32x16 x) { return gelu(x); });
        case KIND_GELU_TANH:
            return f([](F32x16 x) { return gelu_tanh(x); });
        case KIND_RELU:
            return f([](F32x16 x) { return relu(x); });
        case KIND_RELU2:
            return f([](F32x16 x) { return relu(x) * relu(x); });
        case KIND_SIGMOID:
            return f([](F32x16 x) { return sigmoid(x); });
        case KIND_QUICK_GELU:
            return f([](F32x16 x) { return quick_gelu(x); });
        case KIND_BELOW_ZERO:
            return f([](F32x16 x) { return below_zero(x); });
        default:
            return f([](F32x16 x) { return tanh(x); });
    }
}

}  // namespace
}  // namespace octavo
