"""The passes over a graph that the CPU's kernels ask for, in their order."""

from __future__ import annotations

from octavo.graph import passes

PASSES = (
    passes.fuse_attention,
    passes.fuse_gated_linears,
    passes.fuse_residual,
    passes.fuse_norm,
    passes.select_rows_early,
)
