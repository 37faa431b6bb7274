"""Reads adapters in PEFT's folders, with `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.adapters.adapter import EMBEDDING, AdapterBase, StoredAdapter, StoredPart, checked_invocation
from octavo.adapters.expert_parameters import checked_targets, parameter_of, parts_of_parameter
from octavo.adapters.module_patterns import ModulePatterns
from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import HEAD_PLACE, LowRank
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.json_file import read_json_object
from octavo.loader.pickles import check_no_pickles
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles
from octavo.platform.background_work import give_way

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_MAX_NUMBER = 1e30  # fits float32

PREFIX = "base_model.model."  # of all module names
# Endings of tensors' names. For an embedding, A has a column for each token.
_FACTORS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitudes",
    ".lora_magnitude_vector.weight": "magnitudes",
}
_ENDING = re.compile("|".join(re.escape(each) + r"\Z" for each in _FACTORS))
_TABLES = r"(?:.*\.)?(?P<module>embed_tokens|lm_head|wte|embed_in|embed_out)"
_COPIES = re.compile(_TABLES + r"(?P<base>\.base_layer)?\.weight")
_WHOLE = re.compile(_TABLES + r"(?:\.modules_to_save(?:\.\w+)?)?\.weight")
_BIAS = "biases of low-rank products (lora_bias)"
_TOKENS = "trained rows of the embedding (trainable_token_indices)"
# Settings without which an adapter would mean something else.
_REFUSED = {
    "lora_bias": _BIAS,
    "layer_replication": "repeated layers",
    "trainable_token_indices": _TOKENS,
    "use_qalora": "pooled inputs of low-rank products",
}
# Tensors of unsupported features, the most specific first.
_REFUSED_TENSORS = {
    r"\.lora_B\.bias": _BIAS,
    r"\.(?:trainable_tokens_delta|token_adapter\..*)": _TOKENS,
    r"(?<!\.lora_[AB])(?<!\.lora_magnitude_vector)\.weight": (
        "a whole weight (modules_to_save) may only replace the embedding or the output head; any other would mean a "
        "whole model for each adapter"
    ),
}


@dataclass(frozen=True, slots=True)
class AdapterScales:
    """The rank and scale of each module, by PEFT's rules.

    targets: parameters that the adapter changes by parameter name (`target_parameters`).
    """

    rank: float
    alpha: float
    ranks: ModulePatterns
    alphas: ModulePatterns
    by_root: bool  # rsLoRA: divide by the square root of the rank
    targets: frozenset[str] = frozenset()

    def rank_of(self, module: str) -> float:
        """Return the rank of a module, or of each expert of a parameter."""
        return self.ranks.find(module, self.rank)

    def of(self, module: str) -> float:
        """Return the scale of a module."""
        rank, alpha = self.rank_of(module), self.alphas.find(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def read_peft(folder: Path, base: AdapterBase) -> StoredAdapter:
    """Return the adapter in a folder. B's rows are in the order of safetensors files.

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
        check_tensors(path, names, settings)
        scales = checked_scales(settings_path, settings)
        parts = _parts(path, file, names, scales, base)
        if settings.get("use_dora"):
            _check_magnitudes(parts)
        parts |= _whole_parts(file, [name for name in names if _WHOLE.fullmatch(name)], base)
        if settings.get("ensure_weight_tying"):
            parts |= _tied(parts, base)
        return StoredAdapter(parts, invocation)


def weights_file(folder: Path) -> Path:
    """Return the file that contains the factors. Raises ModelLoadError if the folder has none."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        check_no_pickles(folder, sorted(each.name for each in folder.iterdir()), "Save the adapter as safetensors")
        raise ModelLoadError(f"{path}: no such file; an adapter needs it next to {CONFIG_NAME}")
    return path


def copies_of(names: Iterable[str], settings: Mapping[str, object]) -> set[str]:
    """Return the tensors that PEFT saved as mere copies of the base's embedding and head, not the trained ones."""
    given = settings.get("modules_to_save")
    saved = [str(each).rpartition(".")[2] for each in given] if isinstance(given, list) else []
    found = ((name, _COPIES.fullmatch(name)) for name in names)
    return {name for name, copy in found if copy is not None and (copy["base"] or copy["module"] not in saved)}


def check_tensors(path: Path, names: Iterable[str], settings: Mapping[str, object]) -> None:
    """Raise ModelLoadError naming a tensor that does not belong to an adapter, and why nothing uses it."""
    for name in names:
        give_way()
        if settings.get("modules_to_save") and _WHOLE.fullmatch(name):
            continue
        ending = _ENDING.search(name)
        for pattern, reason in _REFUSED_TENSORS.items():
            if re.search(pattern + r"\Z", name):
                raise ModelLoadError(f"{path}: tensor {name!r:.120} is not supported: {reason}")
        if ending is None or not name.startswith(PREFIX):
            raise ModelLoadError(f"{path}: tensor {name!r:.120} is not a low-rank factor of a weight: not supported")


def checked_scales(path: Path, settings: Mapping[str, object]) -> AdapterScales:
    """Return the scale of each module. Raises ModelLoadError naming a setting that is wrong or not supported."""
    if settings.get("peft_type") != "LORA":
        raise ModelLoadError(f"{path}: peft_type is {settings.get('peft_type')!r:.40}; only LORA is supported")
    for key, what in _REFUSED.items():
        if settings.get(key):
            raise ModelLoadError(f"{path}: {key} is {settings[key]!r:.80}: {what} are not supported")
    if not isinstance(settings.get("modules_to_save") or [], list):
        raise ModelLoadError(
            f"{path}: modules_to_save is {settings['modules_to_save']!r:.80}; it must be a list of names"
        )
    return AdapterScales(
        rank=_number(path, "r", settings.get("r", 8), low=1),
        alpha=_number(path, "lora_alpha", settings.get("lora_alpha", 8)),
        ranks=_patterns(path, settings, "rank_pattern", low=1),
        alphas=_patterns(path, settings, "alpha_pattern"),
        by_root=bool(settings.get("use_rslora")),
        targets=checked_targets(path, settings),
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
    path: Path, file: TensorFiles, names: Sequence[str], scales: AdapterScales, base: AdapterBase
) -> dict[str, StoredPart]:
    """Return the parts with low-rank factors. Until `with_gains` is called, their gains contain the magnitudes."""
    modules: dict[str, dict[str, str]] = {}
    for tensor in names:
        if (ending := _ENDING.search(tensor)) is not None:
            module = tensor[len(PREFIX) : ending.start()]
            modules.setdefault(module, {})[_FACTORS[ending[0]]] = tensor
    found: dict[str, StoredPart] = {}
    for module, tensors in modules.items():
        give_way()
        if not tensors.keys() >= {"a", "b"}:
            tensor = next(iter(tensors.values()))
            raise ModelLoadError(f"{path}: tensor {tensor!r:.120} comes without its other factor")
        a, b = (_numbers(file, tensors[each]) for each in "ab")
        tensor, parameter = tensors["a"], parameter_of(module, scales.targets)
        if parameter is not None and (name := tensors.get("magnitudes")) is not None:
            raise ModelLoadError(
                f"{path}: tensor {name!r:.120} is not supported: magnitudes (DoRA) together with {parameter}"
            )
        part = LowRank.checked(a, b, scales.of(parameter or module), tensor)
        if "magnitudes" in tensors:
            part = part.with_magnitudes(_numbers(file, tensors["magnitudes"]), tensors["magnitudes"])
        if parameter is None:
            found[checkpoint_name(f"{module}.weight", base.table)] = StoredPart(tensor, part)
            continue
        rank = int(scales.rank_of(parameter))
        if part.rank % rank:
            raise ModelLoadError(
                f"{path}: tensor {tensor!r:.120} has {part.rank} rows, not a multiple of the rank {rank}"
            )
        named = parts_of_parameter(parameter, part, rank, base)
        found |= {name: StoredPart(tensor, each) for name, each in named}
    return found


def _check_magnitudes(parts: Mapping[str, StoredPart]) -> None:
    for part in parts.values():
        if part.low_rank.gain is None:
            raise part.refuse("comes without a lora_magnitude_vector, but use_dora is true")


def _whole_parts(file: TensorFiles, names: Iterable[str], base: AdapterBase) -> dict[str, StoredPart]:
    """Return the weights that replace the model's embedding or head."""
    found: dict[str, StoredPart] = {}
    for tensor in names:
        module = re.sub(r"(?:\.modules_to_save(?:\.\w+)?)?\.weight\Z", "", tensor.removeprefix(PREFIX))
        name, numbers = checkpoint_name(f"{module}.weight", base.table), _numbers(file, tensor)
        if numbers.ndim != 2:
            raise ModelLoadError(f"tensor {tensor!r:.120} is {list(numbers.shape)}; it must be a matrix")
        if not np.isfinite(numbers).all():
            raise ModelLoadError(f"tensor {tensor!r:.120} has numbers that are not finite")
        found[name] = StoredPart(tensor, LowRank.whole(numbers.T if name in base.tables else numbers))
    return found


def _tied(parts: Mapping[str, StoredPart], base: AdapterBase) -> dict[str, StoredPart]:
    """Return the change of an embedding, applied also to a head tied to it (`ensure_weight_tying`)."""
    if HEAD_PLACE in base.weights or HEAD_PLACE in parts:
        return {}
    found: dict[str, StoredPart] = {}
    for name in {EMBEDDING} & base.tables & parts.keys():
        part = parts[name]
        if part.low_rank.gain is not None and part.low_rank.a is not None:
            raise part.refuse("has magnitudes (DoRA) per column, but a head tied to it needs them per row")
        found[HEAD_PLACE] = replace(part, low_rank=part.low_rank.transposed())
    return found


def _numbers(file: TensorFiles, tensor: str) -> Float32:
    return file.weight(tensor).dequantize().astype(np.float32)
