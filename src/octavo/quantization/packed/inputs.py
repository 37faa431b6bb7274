"""Rounded inputs: the rows by which some checkpoints have their weights multiplied.

A W8A8 or FP8 checkpoint was made for products of codes with codes. Its weights say so (`inputs`). Scales are made of
each row as it comes, so they are as fine as those of the checkpoint, or finer: the largest magnitude of a group of
columns / 127 (int8) or / 448 (e4m3), and 1 if all are zero. A code is the nearest to x / scale, halves to even.
"""

from __future__ import annotations

from typing import Literal

InputKind = Literal["int8", "e4m3"]

LARGEST = {"int8": 127.0, "e4m3": 448.0}
