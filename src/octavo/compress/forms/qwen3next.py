"""Qwen3-Next as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.qwen3next import Config

_INTERVAL = 4  # every fourth layer has attention


def _keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Qwen 3.5 has an architecture of its own in GGUF files, with value heads in another order."""
    kind = reader.text("model_type", "qwen3_next")
    if kind != "qwen3_next":
        raise reader.error("model_type", kind, "only Qwen3-Next can be written as GGUF yet, not Qwen 3.5")
    delta = cfg.delta
    return {
        **decoder_keys(cfg, reader),
        "ssm.conv_kernel": reader.integer("linear_conv_kernel_dim", 4),
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.num_k_heads,
        "ssm.time_step_rank": delta.num_v_heads,
        "ssm.inner_size": delta.num_v_heads * delta.value_dim,
        "full_attention_interval": _interval(reader, cfg.num_layers),
    }


def _interval(reader: ConfigReader, num_layers: int) -> int:
    """Raises ModelLoadError if attention is not in every n-th layer."""
    interval = reader.integer("full_attention_interval", _INTERVAL)
    if not reader.has("layer_types"):
        return interval
    kinds = reader.texts("layer_types", num_layers)
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else num_layers + 1
    if any((kind == "full_attention") != ((i + 1) % interval == 0) for i, kind in enumerate(kinds)):
        raise reader.error("layer_types", kinds, "GGUF files know attention in every n-th layer only")
    return interval


GGUF = GGUFForm("qwen3next", _keys)
