"""Opens the folder of an EAGLE-3 head for the model that it drafts for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint, config_beside, errors_of
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import find_model_file
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles, Weights
from octavo.models._decoder import DecoderConfig
from octavo.models._eagle3 import Eagle3Config, check_taps, eagle3_config, eagle3_name, is_eagle3
from octavo.models._reading import ConfigReader

_MAPS, _BUFFERS = ("d2t", "t2d"), ("rotary_emb.inv_freq",)
_EMBEDDING = "embed_tokens.weight"
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head, together with the weights that it takes from its model. The caller must close its checkpoint.

    target_ids: [draft vocab], the model's token id for each row of the head's logits; None if row i is token i.
    output_head: the name of the model's output head, for a head without one.
    """

    checkpoint: Checkpoint
    config: Eagle3Config
    target_ids: NDArray[np.int32] | None
    output_head: str


def is_eagle_head(path: Path) -> bool:
    """Return True for the folder of a head, or a file in it."""
    return is_eagle3(config_beside(path))


def open_eagle_head(path: Path, target: Checkpoint) -> EagleHead:
    """Open the head. Raises ModelLoadError naming file and reason, including if the head was made for another model."""
    path = find_model_file(path)
    if not isinstance(target.config, DecoderConfig):
        raise ModelLoadError(f"{path}: an EAGLE-3 head drafts for a decoder, but {target.architecture} is not one")
    file = open_safetensors(path)
    try:
        return _opened(path, file, target, target.config)
    except BaseException:
        file.close()
        raise


def _opened(path: Path, file: TensorFiles, target: Checkpoint, model: DecoderConfig) -> EagleHead:
    config_path = path.parent / "config.json"
    with errors_of(config_path):
        config = eagle3_config(ConfigReader(read_json_object(config_path, MAX_CONFIG_BYTES)), model.num_layers)
    names = [name for name in file.tensors if name not in _MAPS and not name.endswith(_BUFFERS)]
    weights = Weights({eagle3_name(name, config.layer): file.source(name) for name in names}, file)
    shared, output_head = [_EMBEDDING], model.output_head
    if eagle3_name("lm_head.weight", config.layer) not in weights:
        shared.append(f"{output_head}.weight")
    num_rows = weights.shapes.get(eagle3_name("lm_head.weight", config.layer), (model.vocab_size,))[0]
    with errors_of(path):
        check_taps(config, weights.shapes, model.hidden_size)
        target_ids = _target_ids(file, num_rows, model.vocab_size)
    weights = weights.joined(target.weights, shared)
    checkpoint = Checkpoint(path, "safetensors", "eagle3", config, weights, file, [*map(file.source, names)])
    return EagleHead(checkpoint, config, target_ids, output_head)


def _target_ids(file: TensorFiles, num_rows: int, vocab_size: int) -> NDArray[np.int32] | None:
    """Return the token ids according to the tensor `d2t`, or None if the file has none.

    For each row of logits, `d2t` has the model's token id minus the head's.
    """
    if "d2t" not in file.tensors:
        if num_rows > vocab_size:
            raise ModelLoadError(
                f"the head has {num_rows} rows of logits and no d2t; the model has {vocab_size} tokens"
            )
        return None
    info = file.tensors["d2t"]
    if info.type_name not in _INTEGERS or info.shape != (num_rows,):
        raise ModelLoadError(f"d2t is {info.type_name} {list(info.shape)}; it must be integers, {num_rows} of them")
    differences = np.frombuffer(file.array("d2t").tobytes(), _INTEGERS[info.type_name])
    found: NDArray[np.int64] = np.arange(num_rows) + differences
    if found.min(initial=0) < 0 or found.max(initial=0) >= vocab_size:
        worst = found[(found < 0) | (found >= vocab_size)][0]
        raise ModelLoadError(f"d2t names token {worst}; the model has {vocab_size}: the head belongs to another model")
    return found.astype(np.int32)
