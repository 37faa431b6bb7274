// The tile instructions. Not the compiler's intrinsics: GCC 12 declares no memory operands for them and moves or drops
// stores to what they read. Tile numbers are compile-time constants; strides are bytes.
#pragma once

#include <cstddef>

namespace octavo {
namespace {

#if defined(OCTAVO_EMULATE_AVX512)

template <int tile>
inline void tile_load(const void* base, size_t stride) {
    _tile_loadd(tile, base, stride);
}
template <int tile>
inline void tile_store(void* base, size_t stride) {
    _tile_stored(tile, base, stride);
}
template <int tile>
inline void tile_zero() {
    _tile_zero(tile);
}
template <int c, int a, int b>
inline void tile_dot_signed_unsigned() {
    _tile_dpbsud(c, a, b);
}

#else

template <int tile>
inline void tile_load(const void* base, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* base, size_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}
// c += a * b, rows of a signed bytes, b unsigned bytes in quads
template <int c, int a, int b>
inline void tile_dot_signed_unsigned() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#endif

}  // namespace
}  // namespace octavo
