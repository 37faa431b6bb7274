"""A loaded model as the endpoints see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.client import EngineClient, ModelInfo
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.server.models.image_reader import ImageReader
from octavo.server.models.served_adapters import ServedAdapter
from octavo.server.tool_parsers.tool_format import ToolFormat
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerTexts:
    """Texts from a tokenizer that are known even while the model is not loaded.

    bos_token, eos_token: "" if there is none
    """

    chat_template: str | None
    bos_token: str
    eos_token: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model.

    name: its name in requests; an adapter's name if the request names an adapter
    tool_format: its tool call format, or None if its template does not support tools
    images: reads the images of requests, if the model accepts images
    adapter: the adapter for all requests under this name, or None
    """

    name: str
    client: EngineClient
    prompts: PromptEncoder
    tool_format: ToolFormat | None = None
    images: ImageReader = field(default_factory=ImageReader)
    adapter: ServedAdapter | None = None

    @property
    def model_name(self) -> str:
        """The id of the model itself. All its adapters share its engine and queue."""
        return self.name if self.adapter is None else self.adapter.parent

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self.client.info

    @property
    def texts(self) -> TokenizerTexts:
        tokenizer, ids = self.tokenizer, (self.tokenizer.bos_token_id, self.info.eos_token_id)
        bos, eos = ("" if i is None else tokenizer.tokens[i] for i in ids)
        return TokenizerTexts(tokenizer.template_source() or None, bos, eos)
