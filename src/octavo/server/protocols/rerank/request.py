"""The bodies of `/v1/rerank` in Jina's and Cohere's format, and of `/v1/score` in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from octavo.server.http.json_body import WHOLE, Int, RequestModel, Text
from octavo.server.protocols.ignored_fields import VECTORS, with_ignored
from octavo.server.protocols.protocol_fields import OptionFields, kind_of_inputs

MAX_TEXTS = 2048

_MANY = Field(min_length=1, max_length=MAX_TEXTS)
_Truncation = Annotated[int, Field(ge=-1), WHOLE]


class Document(RequestModel):
    """A document given as an object."""

    text: Text


def _kind_of_document(value: Any) -> str:
    return "object" if isinstance(value, (dict, Document)) else "text"


_Document = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Document, Tag("object")], Discriminator(_kind_of_document)
]
_Texts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Text], Tag("texts"), _MANY], Discriminator(kind_of_inputs)
]


class RerankRequest(with_ignored(OptionFields, VECTORS)):  # type: ignore[misc]
    """A query and documents to rank.

    top_n: number of results, or None for all
    return_documents: true by default
    instruction: instruction for a causal reranker
    truncate_prompt_tokens: maximum number of tokens in a pair of query and document, or -1 for the model's limit. The
    documents of longer pairs are cut; by default, longer pairs are an error.
    max_tokens_per_doc: Cohere's name for truncate_prompt_tokens
    """

    model: Text | None = None
    query: Text
    documents: Annotated[list[_Document], _MANY]
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: _Truncation | None = None
    max_tokens_per_doc: Annotated[Int, Field(json_schema_extra={"minimum": 1})] | None = None
    instruction: Text | None = None
    user: Text | None = None


class ScoreRequest(with_ignored(OptionFields, VECTORS)):  # type: ignore[misc]
    """Pairs of texts to score. Other fields: see RerankRequest.

    text_1, text_2: one text to pair with each of many, or two lists of the same length
    """

    model: Text | None = None
    text_1: _Texts
    text_2: _Texts
    truncate_prompt_tokens: _Truncation | None = None
    instruction: Text | None = None
    user: Text | None = None
