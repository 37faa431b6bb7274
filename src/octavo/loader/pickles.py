"""Refuses PyTorch's checkpoint files, which are pickles: opening one can run any code."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import ModelLoadError

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_no_pickles(place: object, names: Iterable[str], remedy: str) -> None:
    """Raise ModelLoadError with the remedy if any of these files is a pickle. Call it when no loadable model was found.

    place: the directory or repository that contains the files.
    remedy: advice on where to get other files.
    """
    pickles = [name for name in names if name.endswith(_SUFFIXES)]
    if pickles:
        raise ModelLoadError(
            f"{place}: {pickles[0]} is a pickle; pickle checkpoints are not supported, because opening one can run "
            f"any code. {remedy}, or convert it if you trust it: with transformers, "
            "AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(DIRECTORY) writes safetensors"
        )
