"""Notes, in the start-up log and in plans, about weights or a cache that take more memory or time than expected."""

from __future__ import annotations

from octavo.backends.memory import Sizes
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import size
from octavo.quantization.packed import DENSE_TYPES


def growth_notes(sizes: Sizes) -> list[str]:
    """Return a sentence for each type whose weights grow in memory, with the factor and what becomes slower."""
    return [
        f"{grown.type_name} has no kernel of its own: its weights are kept as {grown.packed_as} and take "
        f"{grown.factor:.1f} times their size in the file, {size(grown.packed_bytes)} instead of "
        f"{size(grown.stored_bytes)}. Reading them takes about that many times as long"
        + (
            ", and prompts take longer too, because products are computed in floats"
            if grown.packed_as in DENSE_TYPES
            else ""
        )
        for grown in sizes.grown
    ]


def unpacking_notes(sizes: Sizes) -> list[str]:
    """Return a sentence for each type that no kernel of the device can multiply directly, with the cost."""
    return [
        f"{found.type_name} has no kernel here: its weights stay quantized in memory, and each step dequantizes them "
        f"tile by tile. It reads {size(found.packed_bytes)} of codes, and writes and reads "
        f"{size(found.unpacked_bytes)} of floats: {1 + 2 * found.unpacked_bytes / max(found.packed_bytes, 1):.0f} "
        "times what a kernel would read"
        for found in sizes.unpacked
    ]


def size_notes(config: EngineConfig, sizes: Sizes) -> list[str]:
    """Return sentences about surprising sizes: weights that grow or lack kernels, a cache that ignores `kv_dtype`."""
    formats = sizes.cache.formats
    asked = config.kv_dtype
    notes = [*growth_notes(sizes), *unpacking_notes(sizes)]
    if asked == "float16" or not formats or {"int8", "float8_e4m3fn"} & {*formats}:
        return notes
    return [
        *notes,
        f"kv_dtype {asked} has no effect: the KV cache stays {formats[0]} in all layers. {asked} needs separate keys "
        "and values. Latents would lose too much accuracy, and on torch so would keys with a bias (docs/accuracy.md)",
    ]
