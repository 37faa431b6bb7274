"""The dense models of Hunyuan as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, Keys, decoder_keys
from octavo.models._reading import ConfigReader
from octavo.models.hunyuan_dense import Config, stretched_theta


def hunyuan_keys(cfg: Config, reader: ConfigReader) -> Keys:
    """Return the keys that decoders share. The stored rotary base already includes the factor from `alpha`."""
    theta = stretched_theta(reader, cfg.head_dim)
    return decoder_keys(cfg, reader, rope=None if theta is None else ConfigReader({"rope_theta": theta}))


GGUF = GGUFForm("hunyuan-dense", hunyuan_keys)
