"""The forms in which `octavo convert` writes architectures: one module for each, named like the one in `octavo.models`.

Each module has `GGUF`, the form in GGUF files, `HF`, the form in transformers checkpoints, or both. Files whose names
begin with an underscore hold shared parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from octavo.compress.forms._gguf import GGUFForm
from octavo.compress.forms._hf import HFForm
from octavo.errors import ModelLoadError


def gguf_form(architecture: str) -> GGUFForm:
    """Return the GGUF form of a module under `octavo.models`.

    Raises ModelLoadError listing the modules that have one.
    """
    return cast(GGUFForm, _declared(architecture, "GGUF", "GGUF"))


def hf_form(architecture: str) -> HFForm:
    """Return the form of a module in transformers checkpoints, like `gguf_form`."""
    return cast(HFForm, _declared(architecture, "HF", "safetensors"))


def _declared(architecture: str, name: str, files: str) -> object:
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    form = _form(architecture, name) if architecture in modules else None
    if form is None:
        known = ", ".join(module for module in modules if _form(module, name) is not None)
        raise ModelLoadError(f"architecture {architecture!r} cannot be written as {files} yet; supported are {known}")
    return form


def _form(module: str, name: str) -> object:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
