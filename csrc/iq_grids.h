// The grids of ggml's IQ types: vectors of values, one after the other. Files store indices into them.
#pragma once

#include <cstdint>

namespace octavo {

template <int Size>
struct alignas(64) Grid {
    int8_t values[Size];
};

extern const Grid<8 * 4096>
    IQ1_GRID;  // for IQ1_S and IQ1_M: the values times eight, plus the shift; minus the shift from index 2048 on
extern const Grid<8 * 1024> IQ2_XXS_GRID, IQ2_XS_GRID, IQ2_S_GRID;
extern const Grid<4 * 256> IQ3_XXS_GRID;

// Writes the odd values of entry `index`, which must be below 512.
void iq3_s_vector(int index, int8_t (&out)[4]);

}  // namespace octavo
