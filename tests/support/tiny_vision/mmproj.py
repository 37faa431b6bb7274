"""Tiny vision models as GGUF: the text model, and its vision part as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
from click.testing import CliRunner
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.batch import Float32
from octavo.cli.quantize import convert
from octavo.config import EngineConfig
from octavo.engine.loading.encoder import load_encodings
from octavo.loader.vision import VisionPart
from octavo.media.processor import Picture
from octavo.prompt import MediaItem
from tests.support.tiny_vision import tiny


def save_gguf(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """Write the text model of a folder that `save` made as a GGUF file, with the vision part next to it."""
    text = folder.with_name(f"{folder.name}-gguf") / "text.gguf"
    text.parent.mkdir()
    result = CliRunner().invoke(convert, [str(folder), str(text), "--dtype", "f32"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    save_mmproj(model, text.with_name("mmproj-tiny.gguf"), name)
    return text


def save_mmproj(model: PreTrainedModel, path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    vision = model.config.vision_config
    keys = {
        "embedding_length": _first(vision, "embed_dim", "mm_embed_dim", "hidden_size"),
        "block_count": _first(vision, "depth", "num_hidden_layers"),
        "attention.head_count": _first(vision, "num_heads", "num_attention_heads"),
        "patch_size": _side(vision.patch_size),
        "projection_dim": 64,
        "image_size": _side(getattr(vision, "image_size", 24)),
    }
    # Which llama.cpp reads, as it does the two below.
    keys["feed_forward_length"] = _first(vision, "intermediate_size") or keys["embedding_length"] * 2
    writer.add_bool("clip.has_vision_encoder", True)
    kind = getattr(vision, "hidden_act", "gelu")
    if kind != "quick_gelu":  # which a file without a kind has
        writer.add_bool("clip.use_silu" if kind == "silu" else "clip.use_gelu", True)
    for key, value in keys.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    is_plain = name.startswith("gemma4")
    for key, value in (("image_mean", 0.0 if is_plain else 0.5), ("image_std", 1.0 if is_plain else 0.5)):
        writer.add_array(f"clip.vision.{key}", [value] * 3)
    write = tiny(name).mmproj
    assert write is not None
    write(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(part: VisionPart, right: VisionPart, picture: Picture) -> Float32:
    """Return the rows of a picture that the processor of `right` lays out."""
    layout = right.processor.layout(picture.width, picture.height)
    encoder = load_encodings(EngineConfig(model="m", backend="reference"), part).encoder
    encoder.processor = right.processor
    encoder.begin([MediaItem(b"a", layout, right.processor.resize(picture, layout))])
    ((_, rows),) = encoder.run(None)
    encoder.close()
    return rows


def _side(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _first(config: PreTrainedConfig, *names: str) -> int:
    """Return the first of these fields that a configuration has, or 0 if it has none."""
    return next((value for name in names if (value := getattr(config, name, 0))), 0)
