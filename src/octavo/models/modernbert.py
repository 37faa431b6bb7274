"""ModernBERT: rotary positions, local and global layers, GeGLU, pre-norm. Warner et al., arXiv 2412.13663."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.graph.ops.attention import RopeParams
from octavo.models._encoder import EncoderConfig, build, head_dim_of, split_encoder
from octavo.models._reading import MAX_LAYERS, ConfigReader, is_classifier
from octavo.models._rope import rope_from_hf, scaled
from octavo.models._weights import Split, WeightTable

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("modern-bert",)
_GATE_UP = ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj")
WEIGHTS = WeightTable(
    names={
        "embeddings.tok_embeddings": "embed_tokens",
        "embeddings.norm": "embed_norm",
        "layers.*.attn_norm": "layers.*.input_layernorm",
        "layers.*.attn.Wqkv": "layers.*.self_attn.qkv_proj",
        "layers.*.attn.Wo": "layers.*.self_attn.o_proj",
        "layers.*.mlp_norm": "layers.*.post_attention_layernorm",
        "layers.*.mlp.Wi": "layers.*.mlp.gate_up_proj",
        "layers.*.mlp.Wo": "layers.*.mlp.down_proj",
        "final_norm": "norm",
        "head.dense": "pooler",
        "head.norm": "head_norm",
        "decoder": "mlm_decoder",
        "token_embd_norm": "embed_norm",
        "blk.*.ffn_up": "layers.*.mlp.gate_up_proj",
        "cls": "pooler",
        "cls.norm": "head_norm",
        "cls.output": "classifier",
    },
    transforms=(*split_encoder(), Split("layers.*.mlp.gate_up_proj", _GATE_UP, lambda cfg: cfg.mlp_rows)),
)

_LOCAL = "sliding_attention"
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0


class Config(EncoderConfig):
    """ModernBERT's configuration. A token in a local layer sees half of `local_attention` tokens on each side.

    Local layers have their own rotary base.
    """

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        window = reader.integer("attention.sliding_window", 128, low=2) // 2
        pattern = reader.integer("attention.sliding_window_pattern", 3)
        head_dim = head_dim_of(reader, "attention.head_count", "embedding_length")
        whole = scaled(head_dim, reader.number("rope.freq_base", _GLOBAL_THETA, low=1.0))
        local = scaled(head_dim, reader.number("rope.freq_base_swa", _LOCAL_THETA, low=1.0))
        is_local = [bool(layer % pattern) for layer in range(num_layers)]
        return cls.read_gguf(
            reader,
            shapes,
            block="pre_norm",
            is_gated=True,
            head_activation="gelu",
            windows=tuple(window if each else None for each in is_local),
            ropes=tuple(local if each else whole for each in is_local),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        window = reader.integer("local_attention", 128, low=2) // 2
        is_local = _local_layers(reader, num_layers)
        whole = _rope(reader, "full_attention", "global_rope_theta", _GLOBAL_THETA)
        local = _rope(reader, _LOCAL, "local_rope_theta", _LOCAL_THETA)
        for key in ("hidden_activation", "classifier_activation"):
            if (kind := reader.text(key, "gelu")) != "gelu":
                raise reader.error(key, kind, "must be gelu")
        pooling = reader.text("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise reader.error("classifier_pooling", pooling, "must be cls or mean")
        return cls.read_hf(
            reader,
            norm_eps=1e-5,
            block="pre_norm",
            is_gated=True,
            head_activation="gelu",
            pooling=pooling if is_classifier(reader) else "mean",
            windows=tuple(window if each else None for each in is_local),
            ropes=tuple(local if each else whole for each in is_local),
        )


def _local_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    if not reader.has("layer_types"):
        pattern = reader.integer("global_attn_every_n_layers", 3)
        return [bool(layer % pattern) for layer in range(num_layers)]
    return [kind == _LOCAL for kind in reader.texts("layer_types", num_layers, ("full_attention", _LOCAL))]


def _rope(reader: ConfigReader, kind: str, older: str, theta: float) -> RopeParams:
    """Return the rotary embedding of one kind of layer.

    older: key of the base in files from before transformers 5.
    """
    head_dim = head_dim_of(reader, "num_attention_heads", "hidden_size")
    section = reader.section("rope_parameters").section(kind)
    theta = reader.number(older, theta, low=1.0)
    return rope_from_hf(section, head_dim, theta, reader.integer("max_position_embeddings"))
