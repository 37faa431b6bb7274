"""RoBERTa and XLM-RoBERTa: BERT with positions from row `pad_token_id + 1` on. Liu et al., arXiv 1907.11692.

BGE-M3, multilingual E5 and the BGE rerankers use this architecture. Their GGUF files are labelled as BERT.
"""

from __future__ import annotations

from octavo.models import bert
from octavo.models._encoder import build
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["ALIASES", "WEIGHTS", "Config", "build"]

ALIASES = ("xlm-roberta", "roberta", "camembert")
WEIGHTS = WeightTable(
    prefixes=("roberta.", "model."),
    names={
        **bert.BERT_NAMES,
        "classifier.dense": "pooler",
        "classifier.out_proj": "classifier",
        "lm_head.dense": "mlm",
        "lm_head.layer_norm": "mlm_norm",
        "lm_head.decoder": "mlm_decoder",
        "lm_head": "mlm_decoder",
    },
)


class Config(bert.Config):
    """XLM-RoBERTa's configuration. The padding token has a row in the position table; the rows before it are never
    used.
    """

    __slots__ = ()

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader, norm_eps=1e-5, position_offset=reader.integer("pad_token_id", 1, low=0) + 1)
