"""Opens the folder of Gemma 4's assistant for the model that it drafts for."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint, checkpoint_name, config_beside, errors_of
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import find_model_file
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles, Weights
from octavo.models import gemma4
from octavo.models._assistant import PREFIX, assistant_config, is_assistant
from octavo.models._reading import ConfigReader

_EMBEDDING = "embed_tokens.weight"
# Centroids of the vocabulary. Other engines use them to compute only some of the logits; here all are computed.
_CENTROIDS = "masked_embedding."


def is_assistant_folder(path: Path) -> bool:
    """Return True for the folder of an assistant, or a file in it."""
    return is_assistant(config_beside(path))


def open_assistant(path: Path, target: Checkpoint) -> Checkpoint:
    """Return the assistant, whose weights include its model's embedding. The caller must close it.

    Raises ModelLoadError naming file and reason, including if the assistant was made for another model.
    """
    path = find_model_file(path)
    if not isinstance(target.config, gemma4.Config):
        raise ModelLoadError(f"{path}: this assistant drafts for Gemma 4; the model is {target.architecture}")
    file = open_safetensors(path)
    try:
        return _opened(path, file, target, target.config)
    except BaseException:
        file.close()
        raise


def _opened(path: Path, file: TensorFiles, target: Checkpoint, model: gemma4.Config) -> Checkpoint:
    config_path = path.parent / "config.json"
    with errors_of(config_path):
        config = assistant_config(ConfigReader(read_json_object(config_path, MAX_CONFIG_BYTES)), model)
    names = [name for name in file.tensors if not name.startswith(_CENTROIDS)]
    table = gemma4.WEIGHTS
    weights = Weights({PREFIX + checkpoint_name(name, table): file.source(name) for name in names}, file)
    weights = weights.joined(target.weights, [_EMBEDDING])
    return Checkpoint(path, "safetensors", "assistant", config, weights, file, [*map(file.source, names)])
