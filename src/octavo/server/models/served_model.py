"""A loaded model as the endpoints see it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.client import EngineClient, ModelInfo
from octavo.engine.texts.prompt_encoder import PromptEncoder
from octavo.server.tool_parsers.tool_format import ToolFormat
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: its name in requests. tool_format: its format of tool calls; None: its template has no tools."""

    name: str
    client: EngineClient
    prompts: PromptEncoder
    tool_format: ToolFormat | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self.client.info
