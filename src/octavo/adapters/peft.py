"""Adapters in PEFT's folders: `adapter_config.json` beside `adapter_model.safetensors`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.adapters.adapter import AdapterBase, StoredAdapter, StoredPart, checked_invocation
from octavo.adapters.module_patterns import ModulePatterns
from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.json_file import read_json_object
from octavo.loader.pickles import check_no_pickles
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_MAX_NUMBER = 1e30  # of float32

PREFIX = "base_model.model."  # of all modules
_FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_COPIES = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head|wte|embed_in|embed_out)(?:\.base_layer)?\.weight")
_ENDING = re.compile("|".join(re.escape(each) + r"\Z" for each in _FACTORS))
_DORA = "decomposed magnitudes (DoRA) divide by the norms of the rows of each changed weight"
_BIAS = "biases of low-rank products (lora_bias)"
_TOKENS = "trained rows of the embedding (trainable_token_indices)"
# Settings without which an adapter would mean something else.
_REFUSED = {
    "use_dora": _DORA,
    "lora_bias": _BIAS,
    "modules_to_save": "whole weights",
    "target_parameters": "stacks of routed experts",
    "layer_replication": "repeated layers",
    "trainable_token_indices": _TOKENS,
    "use_qalora": "pooled inputs of low-rank products",
}
# Tensors of what is not supported, the most special first.
_REFUSED_TENSORS = {
    r"\.lora_magnitude_vector(?:\.weight)?": _DORA,
    r"\.lora_B\.bias": _BIAS,
    r"\.(?:trainable_tokens_delta|token_adapter\..*)": _TOKENS,
    r"\.experts(?:\.base_layer)*\.lora_[AB]\.weight": "one operation computes all routed experts (target_parameters), "
    "a single expert takes no adapter",
    r"\.lora_embedding_[AB]": "an embedding looks up rows, so there is no product to add to",
    r"(?<!\.lora_[AB])\.weight": "a whole weight (modules_to_save) would be another model for each adapter",
}


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scale of each module, by the rules of PEFT."""

    rank: float
    alpha: float
    ranks: ModulePatterns
    alphas: ModulePatterns
    by_root: bool  # of the rank: rsLoRA

    def of(self, module: str) -> float:
        rank, alpha = self.ranks.find(module, self.rank), self.alphas.find(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_peft(folder: Path, base: AdapterBase) -> StoredAdapter:
    """The adapter of a folder, with B's rows in the order that safetensors files have.

    Raises ModelLoadError naming the key or the tensor.
    """
    settings_path, path = folder / CONFIG_NAME, weights_file(folder)
    settings = read_json_object(settings_path, MAX_CONFIG_BYTES)
    key = "alora_invocation_tokens"
    invocation = checked_invocation(f"{settings_path}: {key}", settings.get(key) or [])
    with closing(open_safetensors(path)) as file:
        own = base.config.vocab_size, base.config.hidden_size
        copies = {name for name in copies_of(file.tensors, settings) if file.tensors[name].shape == own}
        names = [name for name in file.tensors if name not in copies]
        check_tensors(path, names)
        scales = checked_scales(settings_path, settings)
        return StoredAdapter(_parts(path, file, names, scales, base), invocation)


def weights_file(folder: Path) -> Path:
    """The file with the factors. Raises ModelLoadError if the folder has none."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        check_no_pickles(folder, sorted(each.name for each in folder.iterdir()), "Save the adapter as safetensors")
        raise ModelLoadError(f"{path}: no such file; an adapter needs it beside {CONFIG_NAME}")
    return path


def copies_of(names: Iterable[str], settings: Mapping[str, object]) -> set[str]:
    """The tensors that PEFT saves as copies of the base's own embedding and head; none if modules are saved."""
    return set() if settings.get("modules_to_save") else {name for name in names if _COPIES.fullmatch(name)}


def check_tensors(path: Path, names: Iterable[str]) -> None:
    """Raises ModelLoadError naming a tensor that is no factor, and the reason why nothing takes it."""
    for name in names:
        ending = _ENDING.search(name)
        for pattern, reason in _REFUSED_TENSORS.items():
            if re.search(pattern + r"\Z", name):
                raise ModelLoadError(f"{path}: tensor {name!r:.120} is not supported: {reason}")
        if ending is None or not name.startswith(PREFIX):
            raise ModelLoadError(f"{path}: tensor {name!r:.120} is no low-rank factor of a weight: not supported")


def checked_scales(path: Path, settings: Mapping[str, object]) -> _Scales:
    """The scale of each module. Raises ModelLoadError naming a setting that is wrong, or that nothing here takes."""
    if settings.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {settings.get('peft_type')!r:.40}; LORA is supported")
    for key, what in _REFUSED.items():
        if settings.get(key):
            raise ModelLoadError(f"{path}: {key} is {settings[key]!r:.80}: {what} are not supported")
    return _Scales(
        rank=_number(path, "r", settings.get("r", 8), low=1),
        alpha=_number(path, "lora_alpha", settings.get("lora_alpha", 8)),
        ranks=_patterns(path, settings, "rank_pattern", low=1),
        alphas=_patterns(path, settings, "alpha_pattern"),
        by_root=bool(settings.get("use_rslora")),
    )


def _number(path: Path, key: str, value: object, low: float = -_MAX_NUMBER) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= _MAX_NUMBER:
        raise ModelLoadError(f"{path}: {key} is {value!r:.40}; it must be a number" + f" from {low} on" * (low > 0))
    return float(value)


def _patterns(path: Path, settings: Mapping[str, object], key: str, low: float = -_MAX_NUMBER) -> ModulePatterns:
    found = settings.get(key) or {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: {key} is {found!r:.40}; it must be an object of numbers by pattern")
    numbers = {pattern: _number(path, f"{key}[{pattern!r:.80}]", value, low) for pattern, value in found.items()}
    return ModulePatterns(f"{path}: {key}", numbers)


def _parts(
    path: Path, file: TensorFiles, names: Sequence[str], scales: _Scales, base: AdapterBase
) -> dict[str, StoredPart]:
    modules: dict[str, dict[str, str]] = {}
    for tensor in names:
        ending = _ENDING.search(tensor)
        assert ending is not None, "the names have been checked"
        module = tensor[len(PREFIX) : ending.start()]
        modules.setdefault(module, {})[_FACTORS[ending[0]]] = tensor
    found: dict[str, StoredPart] = {}
    for module, tensors in modules.items():
        if tensors.keys() != {"a", "b"}:
            tensor = next(iter(tensors.values()))
            raise ModelLoadError(f"{path}: tensor {tensor!r:.120} has no other factor beside it")
        a, b = (_numbers(file, tensors[each]) for each in "ab")
        tensor, name = tensors["a"], checkpoint_name(f"{module}.weight", base.table)
        found[name] = StoredPart(tensor, LowRank.checked(a, b, scales.of(module), tensor))
    return found


def _numbers(file: TensorFiles, tensor: str) -> Float32:
    return file.weight(tensor).dequantize().astype(np.float32)
