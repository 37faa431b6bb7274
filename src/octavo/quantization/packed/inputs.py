"""Rounded inputs: some checkpoints are made for inputs that are rounded to eight bits, like their weights.

Each weight of a W8A8 or FP8 checkpoint records this (`inputs`). The inputs of a product are then rounded, row by row as
they arrive, so their scales are at least as fine as the checkpoint's. A scale is the largest magnitude of a group of
columns / 127 (int8) or / 448 (e4m3), or 1 if all are zero. A code is the nearest to x / scale, halves to even.
"""

from __future__ import annotations

from typing import Literal

InputKind = Literal["int8", "e4m3"]

LARGEST = {"int8": 127.0, "e4m3": 448.0}
