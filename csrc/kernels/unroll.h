// Loops that the compiler must unroll, so that an array of sums stays in registers regardless of its size.
#pragma once

#include <utility>

namespace octavo {
namespace {

template <int I>
struct Int {
    static constexpr int value = I;
};

// f(Int<0>{}) ... f(Int<N - 1>{}). Not recursive, since each level would copy all deeper ones.
template <typename F, int... I>
__attribute__((always_inline)) inline void unroll_each(const F& f, std::integer_sequence<int, I...>) {
    (f(Int<I>{}), ...);
}
template <int N, typename F>
__attribute__((always_inline)) inline void unroll([[maybe_unused]] const F& f) {
    unroll_each(f, std::make_integer_sequence<int, N>{});
}

}  // namespace
}  // namespace octavo
