// Loops that the compiler must unroll: in them an array of sums stays in registers whatever its size.
#pragma once

namespace octavo {
namespace {

template <int I>
struct Int {
    static constexpr int value = I;
};

// f(Int<0>{}) ... f(Int<N - 1>{})
template <int N, int I = 0, typename F>
__attribute__((always_inline)) inline void unroll(const F& f) {
    if constexpr (I < N) {
        f(Int<I>{});
        unroll<N, I + 1>(f);
    }
}

}  // namespace
}  // namespace octavo
