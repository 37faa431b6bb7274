"""The encoder of Pixtral, Mistral Small 3.x and Ministral 3 as an mmproj file."""

from __future__ import annotations

import numpy as np

from octavo.compress.forms._gguf import Keys, Sources
from octavo.compress.mmproj._form import MmprojForm
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.tensor_files import Source
from octavo.media.families.pixtral import PixtralImages
from octavo.models.towers.pixtral import Config
from octavo.quantization.packed import DenseWeight
from octavo.tokenizer import load_tokenizer

_BREAK = "[IMG_BREAK]"  # follows each row of patches; llama.cpp reads its embedding from the mmproj file


def _keys(cfg: Config, processor: PixtralImages) -> Keys:
    return {"image_size": processor.longest_side, "spatial_merge_size": cfg.merge_size}


def _break(checkpoint: Checkpoint) -> Sources:
    ids = load_tokenizer(checkpoint).encode(_BREAK, add_special_tokens=False, parse_special=True)
    if len(ids) != 1:
        raise ModelLoadError(f"{checkpoint.path}: the vocabulary has no token {_BREAK!r}, which mmproj files need")
    table = checkpoint.weights.info("embed_tokens.weight")
    shape = table.shape[1:]

    def make() -> DenseWeight:
        return DenseWeight(table.make().rows(slice(ids[0], ids[0] + 1)).dequantize().astype(np.float32)[0])

    return {"v.token_embd.img_break": Source("F32", shape, 4 * shape[0], table.tensors, make)}


MMPROJ = MmprojForm(lambda _cfg: "pixtral", _keys, further=_break, activation="silu", norm_eps=1e-5)
