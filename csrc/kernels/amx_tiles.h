// The tile instructions. Not the compiler's intrinsics: GCC 12 declares no memory operands for them and moves or drops
// stores to what they read. Tile numbers are compile-time constants; strides are bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {
namespace {

// How many rows tiles 0, 1 and 4 have, how many tiles 2, 3 and 5; the others have 16. All rows have 64 bytes. A tile
// with fewer rows takes less time to load, and up to eight rows half the time to multiply.
struct TileRowCounts {
    int first = 0, second = 0;
};
inline bool operator==(TileRowCounts a, TileRowCounts b) { return a.first == b.first && a.second == b.second; }

#if defined(OCTAVO_EMULATE_AVX512)

// Emulated tiles always have 16 rows, as much memory as all of them have.
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

// All tiles are zero afterwards.
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
// What is read from the L2 cache and not soon again: it takes no place of what is needed in the L1 cache.
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

// Says that the tiles are not read until they are loaded again. A processor has more tile registers than the eight with
// names, and gives one to each load and each product until that tile is written the next time. When two hardware
// threads share a core, only about two remain for each: without this, loads and products wait for one another (2 x 2
// tiles: 70 cycles a product, 40 with it; benchmarks/tiles.cpp). It costs nothing where they are plenty.
template <int... tiles>
inline void tiles_unused() {
    (tile_zero<tiles>(), ...);
}

}  // namespace
}  // namespace octavo
