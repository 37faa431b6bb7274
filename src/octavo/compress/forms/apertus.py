"""Apertus as a GGUF file."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from octavo.compress.forms._gguf import GGUFForm, Keys, Sources, Stored, decoder_keys
from octavo.loader.tensor_names import TensorName
from octavo.models._reading import ConfigReader
from octavo.models.apertus import BETA, EPS, STEM, Config


def _stored(cfg: Config, reader: ConfigReader, weights: Sources) -> Stored:  # noqa: ARG001
    """Move the activation slopes from the weights to the configuration, because GGUF files store them as keys."""
    found = {name: source for name, source in weights.items() if TensorName.parse(name).stem.startswith(STEM)}

    def slope(layer: int, part: str) -> float:
        return float(found[f"{STEM.replace('*', str(layer))}{part}.weight"].make().dequantize().reshape(-1)[0])

    slopes = tuple((slope(layer, "above"), slope(layer, "below")) for layer in range(cfg.num_layers))
    return Stored(replace(cfg, slopes=slopes), {name: weights[name] for name in weights if name not in found})


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys. GGUF files store the activation slopes as they are before softplus."""
    keys = decoder_keys(cfg, reader, theta=12e6)
    for part, slopes in (("p", [above for above, _ in cfg.slopes]), ("n", [below - BETA for _, below in cfg.slopes])):
        keys[f"xielu.alpha_{part}"] = np.array([math.log(math.expm1(slope)) for slope in slopes], np.float32)
    constants = {"xielu.beta": BETA, "xielu.eps": EPS}
    return keys | {key: np.full(cfg.num_layers, value, np.float32) for key, value in constants.items()}


GGUF = GGUFForm("apertus", _keys, stored=_stored)
