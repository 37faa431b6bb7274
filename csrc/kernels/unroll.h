// Loops that the compiler must unroll: in them an array of sums stays in registers whatever its size.
#pragma once

#include <utility>

namespace octavo {
namespace {

template <int I>
struct Int {
    static constexpr int value = I;
};

// f(Int<0>{}) ... f(Int<N - 1>{}). Not by recursion: each level would be a copy of all further ones to the compiler.
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
