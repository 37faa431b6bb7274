"""The passes for the CPU's kernels, in their order."""

from __future__ import annotations

from octavo.graph import passes

PASSES = (
    passes.fuse_attention,
    passes.fuse_gated_linears,
    passes.fuse_residual,
    passes.fuse_norm,
    passes.select_rows_early,
)
