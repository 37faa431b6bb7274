"""Reads how a checkpoint computes vectors and scores of texts.

This includes the pooling, the normalization and the head of a cross-encoder.

Source: the files that sentence-transformers saves (`modules.json`, a `config.json` for each module), and the keys
    `pooling_type` and `sentence_transformers` of GGUF files and config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ModelLoadError
from octavo.generation_request import Pooling
from octavo.loader.dense_module import DenseModule, read_dense
from octavo.loader.json_file import read_json_object
from octavo.models._reading import ConfigReader, is_classifier

_MAX_BYTES = 1 << 20
_MAX_MODULES = 16
_POOLING: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLDER_POOLING = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_GGUF_POOLING: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_GGUF_RANK = 4
_LOGS = {"relu": 1, "log1p_relu": 2}  # how often a sparse vector goes through log(1 + x)
_PYLATE_DENSE = "pylate.Dense"
_OF_TOKENS = ("MultiVectorMask", _PYLATE_DENSE)  # modules of models that have a vector for each token


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """A checkpoint's settings for vectors and scores of texts.

    pooling: the pooling of embeddings.
    normalize: scale vectors to length 1.
    is_embedder: the checkpoint was made for embeddings.
    is_classifier: the model ends in a head for sequence classification.
    activation: function that turns the logit of a classifier's single label into a score.
    yes_no: ids of the two tokens whose logits a causal reranker compares, if the checkpoint names them.
    dense: the layers applied to pooled vectors before normalization.
    num_logs: number of times that log(1 + x), after relu, is applied to a sparse vector.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    is_embedder: bool = False
    is_classifier: bool = False
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    yes_no: tuple[int, int] | None = None
    dense: tuple[DenseModule, ...] = ()
    num_logs: int = 0

    def width(self, hidden_size: int) -> int:
        """Return the width of text vectors.

        hidden_size: width of the graph's rows.
        """
        return self.dense[-1].out_features if self.dense else hidden_size


def pooling_of_gguf(metadata: Mapping[str, object], prefix: str) -> PoolingConfig:
    """Read the pooling configuration from a GGUF file's metadata.

    prefix: the prefix of the architecture's keys.

    Raises ModelLoadError naming the key.
    """
    number = ConfigReader(metadata, prefix).integer("pooling_type", 0, low=0, high=_GGUF_RANK)
    if number == _GGUF_RANK:
        return PoolingConfig("cls", is_classifier=True)
    # llama.cpp's programs return vectors of length 1.
    return PoolingConfig(_GGUF_POOLING.get(number, "mean"), normalize=True, is_embedder=number in _GGUF_POOLING)


def pooling_of_directory(directory: Path, config_json: Mapping[str, object], hidden_size: int) -> PoolingConfig:
    """Read the pooling configuration from a model's directory.

    config_json: content of the model's config.json.
    hidden_size: the model's hidden size.

    Raises ModelLoadError naming the file, the key and the value.
    """
    if is_classifier(ConfigReader(config_json)):
        return PoolingConfig(is_classifier=True, activation=_score_activation(directory, config_json))
    if config_json.get("architectures") == ["HF_ColBERT"]:
        return PoolingConfig("all", normalize=True, is_embedder=True)
    path = directory / "modules.json"
    if not path.is_file():
        return PoolingConfig()
    if any(kind == "SpladePooling" for kind, _ in _modules(path)):
        return _sparse(path)
    if any(kind in _OF_TOKENS for kind, _ in _modules(path)):
        return _late_interaction(path, hidden_size)
    pooling: Pooling = "mean"
    normalize, is_embedder = False, False
    yes_no = None
    dense: list[DenseModule] = []
    for kind, folder in _modules(path):
        if kind == "Pooling":
            pooling, is_embedder = _pooling(directory / folder / "config.json"), True
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            if normalize or not is_embedder:
                raise ModelLoadError(f"{path}: the module Dense in {folder} must be between Pooling and Normalize")
            dense.append(_dense(directory / folder, dense[-1].out_features if dense else hidden_size))
        elif kind == "LogitScore":
            yes_no = _yes_no(directory / folder / "config.json")
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{path}: the module {kind} is not supported; Octavo knows Transformer, Pooling, Dense, Normalize, "
                "LogitScore"
            )
    return PoolingConfig(pooling, normalize, is_embedder, yes_no=yes_no, dense=tuple(dense))


def _sparse(path: Path) -> PoolingConfig:
    """Return SPLADE's pooling: for each token of the vocabulary, its largest logit, passed through relu and log(1 +
    x).
    """
    folders = dict(_modules(path))
    for kind in sorted(folders.keys() - {"MLMTransformer", "Transformer", "SpladePooling"}):
        raise ModelLoadError(f"{path}: the module {kind} together with SpladePooling is not supported")
    config = path.parent / folders["SpladePooling"] / "config.json"
    values = read_json_object(config, _MAX_BYTES)
    if values.get("pooling_strategy", "max") != "max":
        raise ModelLoadError(f"{config}: pooling_strategy is {values['pooling_strategy']!r:.80}; it must be max")
    name = values.get("activation_function", "relu")
    if name not in _LOGS:
        raise ModelLoadError(f"{config}: activation_function is {name!r:.80}; it must be {' or '.join(_LOGS)}")
    return PoolingConfig("max", is_embedder=True, num_logs=_LOGS[str(name)])


def _late_interaction(path: Path, hidden_size: int) -> PoolingConfig:
    """Return the pooling for ColBERT models saved by PyLate or sentence-transformers: one unit vector per token."""
    dense: list[DenseModule] = []
    for kind, folder in _modules(path):
        if kind in ("Dense", _PYLATE_DENSE):
            width = dense[-1].out_features if dense else hidden_size
            dense.append(_dense(path.parent / folder, width, of_tokens=True))
        elif kind not in ("Transformer", "MultiVectorMask", "Normalize"):
            raise ModelLoadError(f"{path}: the module {kind} in a model of token vectors is not supported")
    return PoolingConfig("all", normalize=True, is_embedder=True, dense=tuple(dense))


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module. Packages are removed from class names, except for `pylate`."""
    if path.stat().st_size > _MAX_BYTES:
        raise ModelLoadError(f"{path} has {path.stat().st_size:,} bytes; the limit is {_MAX_BYTES:,}")
    try:
        modules = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(modules, list) or not 0 < len(modules) <= _MAX_MODULES:
        raise ModelLoadError(f"{path}: must be a list of 1 to {_MAX_MODULES} modules")
    found = []
    for module in modules:
        kind, folder = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in Path(folder).parts:
            raise ModelLoadError(f"{path}: {module!r:.80} is not a module with type and path")
        if Path(folder).is_absolute():
            raise ModelLoadError(f"{path}: path is {folder!r:.80}; it must be a folder of the model")
        name = kind.rpartition(".")[2]
        found.append((f"pylate.{name}" if kind.startswith("pylate.") else name, folder))
    return found


def _pooling(path: Path) -> Pooling:
    values = read_json_object(path, _MAX_BYTES)
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLDER_POOLING.items() if values.get(key) is True] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLING:
        raise ModelLoadError(f"{path}: pooling_mode is {modes!r:.80}; it must be {', '.join(_POOLING)}")
    if values.get("include_prompt", True) is not True:
        raise ModelLoadError(f"{path}: include_prompt is false; a part of a text cannot be left out of its vector")
    return _POOLING[modes[0]]


def _dense(folder: Path, width: int, *, of_tokens: bool = False) -> DenseModule:
    """Read a dense module and check its width.

    width: length of its input vectors.
    of_tokens: the module changes the vectors of tokens instead of the pooled vector of a text.
    """
    module = read_dense(folder, of_tokens=of_tokens)
    if module.in_features != width:
        path = folder / "config.json"
        raise ModelLoadError(f"{path}: in_features is {module.in_features}, but the vectors before it have {width}")
    return module


def _yes_no(path: Path) -> tuple[int, int]:
    reader = ConfigReader(read_json_object(path, _MAX_BYTES))
    return reader.integer("true_token_id", low=0), reader.integer("false_token_id", low=0)


def _score_activation(directory: Path, config_json: Mapping[str, object]) -> Literal["sigmoid", "identity"]:
    """Return the activation that turns a label's logit into a score. The default is the sigmoid.

    It is read from config.json or from sentence-transformers' own file.
    """
    beside = directory / "config_sentence_transformers.json"
    section = config_json.get("sentence_transformers")
    name = section.get("activation_fn") if isinstance(section, dict) else None
    name = name or config_json.get("sbert_ce_default_activation_function")
    if name is None and beside.is_file():
        name = read_json_object(beside, _MAX_BYTES).get("activation_fn")
    last = str(name or "Sigmoid").rpartition(".")[2]
    if last not in ("Sigmoid", "Identity"):
        path = directory / "config.json"
        raise ModelLoadError(f"{path}: activation_fn is {name!r:.80}; it must be Sigmoid or Identity")
    return "identity" if last == "Identity" else "sigmoid"
