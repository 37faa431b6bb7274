"""Rounded inputs: the rows that some checkpoints expect their weights to multiply.

A W8A8 or FP8 checkpoint was made for products of codes by codes, which its weights record (`inputs`). Scales are
computed for each row as it arrives, so they are at least as fine as the checkpoint's: the largest magnitude of a group
of columns / 127 (int8) or / 448 (e4m3), and 1 if all are zero. A code is the nearest to x / scale, halves to even.
"""

from __future__ import annotations

from typing import Literal

InputKind = Literal["int8", "e4m3"]

LARGEST = {"int8": 127.0, "e4m3": 448.0}
