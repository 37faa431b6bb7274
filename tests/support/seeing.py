"""A vocabulary, chat template and settings of a vision model, for servers with a fake engine."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import tokenizers

from octavo.media.settings import ImageSettings
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer

QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# 32 x 32 pixels a token, at least 4 tokens.
SETTINGS = ImageSettings("qwen3_vl", {}, {"size": {"shortest_edge": 4096, "longest_edge": 1 << 20}})


def seeing(tokenizer: Tokenizer, template: str = TEMPLATE, names: tuple[str, ...] = QWEN) -> Tokenizer:
    """Return the vocabulary with extra control tokens at its end, and this template."""
    changed = []
    for core in (tokenizer.plain, tokenizer.special):
        copy = tokenizers.Tokenizer.from_str(core.to_str())
        copy.encode_special_tokens = core.encode_special_tokens
        copy.add_special_tokens(list(names))
        changed.append(copy)
    added = frozenset(range(len(tokenizer.tokens), len(tokenizer.tokens) + len(names)))
    return dataclasses.replace(
        tokenizer,
        plain=changed[0],
        special=changed[1],
        tokens=[*tokenizer.tokens, *names],
        literal_ids=tokenizer.literal_ids | added,
        special_token_ids=tokenizer.special_token_ids | added,
        chat_template=TemplateSet(template),
    )


def seeing_client(**fields: Any) -> dict[str, Any]:
    """Return the fields of a `FakeClient` with a vision model."""
    return {"draft_info": {"images": SETTINGS, **fields}}


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"
