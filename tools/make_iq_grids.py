"""Write the grids of ggml's IQ types: src/octavo/quantization/iq_grids.npz, and csrc/iq_grids.cpp for the kernels.

The grids are constants of the file format. They are taken from the `gguf` package (part of the `test` extra), checked
for shape and range, and stored as small integers without pickled objects. In C++, each vector is stored as one number:
each digit is the index of a value among those that occur. Run this again only if ggml adds a grid:

    python tools/make_iq_grids.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from gguf import quants
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "src" / "octavo" / "quantization" / "iq_grids.npz"
SOURCE = ROOT / "csrc" / "iq_grids.cpp"
SOURCES = {
    "iq1_s": quants.IQ1_S,  # shared with IQ1_M
    "iq2_xxs": quants.IQ2_XXS,
    "iq2_xs": quants.IQ2_XS,
    "iq2_s": quants.IQ2_S,
    "iq3_xxs": quants.IQ3_XXS,
    "iq3_s": quants.IQ3_S,
}


HEAD = """// The grids of ggml's IQ types as the kernels read them. Written by tools/make_iq_grids.py.
#include "iq_grids.h"

namespace octavo {
namespace {

// Expands vectors of `Width` values. The base-`Levels` digits of a number, lowest first, are indices into `levels`.
template <int Width, int Levels, int Count>
constexpr void spread(const uint16_t (&numbers)[Count], const int8_t (&levels)[Levels], int8_t* out) {
    for (int i = 0; i < Count; ++i) {
        int rest = numbers[i];
        for (int j = 0; j < Width; ++j, rest /= Levels) out[Width * i + j] = levels[rest % Levels];
    }
}

constexpr int8_t LEVELS_2[3] = {8, 25, 43};
constexpr int8_t LEVELS_3[8] = {4, 12, 20, 28, 36, 44, 52, 62};

// Entries that the format does not use are zero, so that every index stays within the grid.
template <int Count>
constexpr Grid<8 * 1024> grid_2(const uint16_t (&numbers)[Count]) {
    Grid<8 * 1024> grid{};
    spread<8>(numbers, LEVELS_2, grid.values);
    return grid;
}

"""
TAIL = """
constexpr Grid<4 * 256> grid_3() {
    Grid<4 * 256> grid{};
    spread<4>(IQ3_XXS, LEVELS_3, grid.values);
    return grid;
}

// Ternary values times 8, plus 1 in the first half and minus 1 in the second.
constexpr Grid<8 * 4096> grid_1() {
    Grid<8 * 4096> grid{};
    constexpr int8_t PLUS[3] = {-7, 1, 9}, MINUS[3] = {-9, -1, 7};
    spread<8>(IQ1_S, PLUS, grid.values);
    spread<8>(IQ1_S, MINUS, grid.values + 8 * 2048);
    return grid;
}

}  // namespace

constexpr Grid<8 * 4096> IQ1_GRID = grid_1();
constexpr Grid<8 * 1024> IQ2_XXS_GRID = grid_2(IQ2_XXS), IQ2_XS_GRID = grid_2(IQ2_XS), IQ2_S_GRID = grid_2(IQ2_S);
constexpr Grid<4 * 256> IQ3_XXS_GRID = grid_3();

// Odd numbers, stored in three bits each.
void iq3_s_vector(int index, int8_t (&out)[4]) {
    for (int j = 0; j < 4; ++j) out[j] = static_cast<int8_t>(2 * (IQ3_S[index] >> (3 * j) & 7) + 1);
}

}  // namespace octavo
"""


def cpp_source(grids: dict[str, NDArray[np.int8]]) -> str:
    parts = [HEAD]
    for name, grid in grids.items():
        levels = np.unique(grid)
        digits = np.searchsorted(levels, grid)
        numbers = (digits * len(levels) ** np.arange(grid.shape[1])).sum(axis=1)
        text = textwrap.fill(", ".join(map(str, numbers)), 114, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"constexpr uint16_t {name.upper()}[{len(grid)}] = {{\n{text}}};\n")
    return "".join([*parts, TAIL])


def main() -> None:
    grids = {}
    for name, source in SOURCES.items():
        source.init_grid()
        grid = source.grid.reshape(source.grid_shape)
        if np.any(grid != np.rint(grid)) or np.abs(grid).max() > 127:
            raise SystemExit(f"{name}: a value is no int8")
        grids[name] = grid.astype(np.int8)
    np.savez_compressed(TARGET, **grids)
    SOURCE.write_text(cpp_source(grids))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {', '.join(grids)}")


if __name__ == "__main__":
    main()
