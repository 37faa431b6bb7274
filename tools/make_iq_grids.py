"""Writes src/octavo/quantization/iq_grids.npz: the grids of ggml's IQ types, as small integers.

The grids are constants of the file format. They are taken from the `gguf` package (part of the
`test` extra), checked for shape and range, and stored without pickled objects. Run it again only
if ggml adds a grid:

    python tools/make_iq_grids.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import quants

TARGET = Path(__file__).resolve().parents[1] / "src" / "octavo" / "quantization" / "iq_grids.npz"
SOURCES = {
    "iq1_s": quants.IQ1_S,  # shared with IQ1_M
    "iq2_xxs": quants.IQ2_XXS,
    "iq2_xs": quants.IQ2_XS,
    "iq2_s": quants.IQ2_S,
    "iq3_xxs": quants.IQ3_XXS,
    "iq3_s": quants.IQ3_S,
}


def main() -> None:
    grids = {}
    for name, source in SOURCES.items():
        source.init_grid()
        grid = source.grid.reshape(source.grid_shape)
        if np.any(grid != np.rint(grid)) or np.abs(grid).max() > 127:
            raise SystemExit(f"{name}: a value is no int8")
        grids[name] = grid.astype(np.int8)
    np.savez_compressed(TARGET, **grids)
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {', '.join(grids)}")


if __name__ == "__main__":
    main()
