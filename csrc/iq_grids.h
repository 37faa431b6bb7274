// The grids of ggml's IQ types: vectors of values, one after the other; a file has their indices.
#pragma once

#include <cstdint>

namespace octavo {

template <int Size>
struct alignas(64) Grid {
    int8_t values[Size];
};

extern const Grid<8 * 4096>
    IQ1_GRID;  // IQ1_S and IQ1_M, eight times the values; from index 2048 on with minus the shift
extern const Grid<8 * 1024> IQ2_XXS_GRID, IQ2_XS_GRID, IQ2_S_GRID;
extern const Grid<4 * 256> IQ3_XXS_GRID;

// The odd values of entry `index`, below 512.
void iq3_s_vector(int index, int8_t (&out)[4]);

}  // namespace octavo
