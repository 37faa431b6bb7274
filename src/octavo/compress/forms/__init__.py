"""The forms in which `octavo convert` writes architectures, one in each file, found by the architecture's file name.

A module here has `GGUF`, the form in GGUF files, or `HF`, that in checkpoints of transformers, or both. Files with a
leading underscore are shared parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from octavo.compress.forms._gguf import GGUFForm
from octavo.compress.forms._hf import HFForm
from octavo.errors import ModelLoadError


def gguf_form(architecture: str) -> GGUFForm:
    """The form in GGUF files of a module under `octavo.models`. Raises ModelLoadError listing those that have one."""
    return cast(GGUFForm, _declared(architecture, "GGUF", "GGUF"))


def hf_form(architecture: str) -> HFForm:
    """The same for checkpoints of transformers."""
    return cast(HFForm, _declared(architecture, "HF", "safetensors"))


def _declared(architecture: str, name: str, files: str) -> object:
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    form = _form(architecture, name) if architecture in modules else None
    if form is None:
        known = ", ".join(module for module in modules if _form(module, name) is not None)
        raise ModelLoadError(f"architecture {architecture!r} cannot be written as {files} yet; declared are {known}")
    return form


def _form(module: str, name: str) -> object:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
