// The tile instructions. GCC 12 declares no memory operands for the compiler's intrinsics, and therefore moves or drops
// stores that they depend on. Tile numbers are compile-time constants; strides are bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {
namespace {

// How many rows tiles 0, 1 and 4 have, and how many tiles 2, 3 and 5; all other tiles have 16. All rows have 64 bytes.
// A tile with fewer rows loads faster, and with up to eight rows multiplies in half the time.
struct TileRowCounts {
    int first = 0, second = 0;
};
inline bool operator==(TileRowCounts a, TileRowCounts b) { return a.first == b.first && a.second == b.second; }

#if defined(OCTAVO_EMULATE_AVX512)

// Emulated tiles always have 16 rows and enough memory for all of them.
inline void configure_tiles(TileRowCounts) {}

template <int tile>
inline void tile_load(const void* base, size_t stride) {
    _tile_loadd(tile, base, stride);
}
template <int tile>
inline void tile_load_once(const void* base, size_t stride) {
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
template <int c, int a, int b>
inline void tile_dot_bf16() {
    _tile_dpbf16ps(c, a, b);
}

#else

// Sets all tiles to zero.
inline void configure_tiles(TileRowCounts rows) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } configuration = {};
    configuration.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        const int count = tile > 5 ? 16 : tile == 2 || tile == 3 || tile == 5 ? rows.second : rows.first;
        configuration.bytes_per_row[tile] = 64;
        configuration.rows[tile] = static_cast<uint8_t>(count);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
}

template <int tile>
inline void tile_load(const void* base, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(tile) : "memory");
}
// Loads data from the L2 cache that is not needed again soon, without evicting data from the L1 cache.
template <int tile>
inline void tile_load_once(const void* base, size_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "i"(tile) : "memory");
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
// c += a * b, rows of a bfloat16, b bfloat16 in pairs
template <int c, int a, int b>
inline void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#endif

// Declares that the tiles are not read again before they are reloaded. A processor has more physical tile registers
// than the eight named ones, and keeps one for each load and product until that tile is next written. When two hardware
// threads share a core, only about two remain for each, and loads and products wait for one another without this call
// (2 x 2 tiles: 70 cycles per product, 40 with it; benchmarks/tiles.cpp). It is free where registers are plentiful.
template <int... tiles>
inline void tiles_unused() {
    (tile_zero<tiles>(), ...);
}

}  // namespace
}  // namespace octavo
