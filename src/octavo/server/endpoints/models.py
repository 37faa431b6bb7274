"""`/v1/models`: the models, their request limits, and manual loading and unloading."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from octavo.config import is_read_as_text
from octavo.engine.client import ModelInfo
from octavo.sampling_params import SamplingParams
from octavo.server.models.model_manager import LoadStatus, ModelManager, ModelState
from octavo.server.server_state import state_of

router = APIRouter(tags=["Models"])


class Memory(BaseModel):
    """A model's memory use in bytes."""

    weight_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int


class DefaultSampling(BaseModel):
    """The sampling parameters for requests that do not set these fields, under vLLM's names.

    TGI requests are greedy by default.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None


class ModelCard(BaseModel):
    """A model: OpenAI's fields, Anthropic's fields (type, display_name, created_at), and additional ones. Fields that
    are known only after the model has been loaded are null until then.

    aliases: the model's other names
    default_sampling_source: the origin of default_sampling_params, see `--generation-config`
    loading: only present while the state is `loading`
    max_model_len: maximum number of tokens in a request, prompt and answer together
    reason: error of the last failed attempt to load the model
    input_modalities: `text`, and `image` if the model accepts images
    pdf_as: how PDF documents are read by default, as pages or as text
    parent: for an adapter, the model that it extends; the adapter's `root` is the path or id that it was loaded from
    """

    id: str
    aliases: list[str]
    object: str = "model"
    type: str = "model"
    display_name: str
    created: int
    created_at: datetime
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int | None
    default_sampling_params: DefaultSampling | None
    default_sampling_source: str | None
    state: ModelState
    loading: LoadStatus | None
    reason: str | None
    architecture: str | None
    memory: Memory | None
    max_num_seqs: int
    has_chat_template: bool | None
    tool_format: str | None
    input_modalities: list[str] | None
    pdf_as: Literal["pages", "text"] | None


class ModelList(BaseModel):
    """All models, loaded or not, with the first and last id of the page for Anthropic's clients."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


@router.get("/models", include_in_schema=False)
@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List all models, loaded or not."""
    models = state_of(request).models
    names = [*(entry.name for entry in models.entries), *(each.name for each in models.adapters.entries)]
    cards = [_card(models, name) for name in names]
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


@router.get("/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> ModelCard:
    """Return one model."""
    return _card(state_of(request).models, model_id)


@router.post("/v1/models/{model_id:path}/load")
async def load_model(request: Request, model_id: str) -> ModelCard:
    """Load a model, unloading others if needed. Answers when it is ready."""
    models = state_of(request).models
    await models.load(model_id)
    return _card(models, model_id)


@router.post("/v1/models/{model_id:path}/unload")
async def unload_model(request: Request, model_id: str) -> ModelCard:
    """Unload a model once its running requests have finished; the next request loads it again."""
    models = state_of(request).models
    await models.unload(model_id)
    return _card(models, model_id)


@router.post("/v1/models/{model_id:path}/restart")
async def restart_model(request: Request, model_id: str) -> ModelCard:
    """Restart a model's replicas one by one, each after its running requests have finished. Answers when all have
    restarted.

    The other replicas keep serving, so no request is refused. The restart continues if the client disconnects.
    """
    models = state_of(request).models
    async with models.use(model_id) as model:
        await model.client.restart()
    return _card(models, model_id)


def _card(models: ModelManager, name: str) -> ModelCard:
    entry, adapter = models.entry(name), models.adapter(name)
    shown = entry.name if adapter is None else adapter.name
    info, model = entry.info, entry.model
    defaults = None
    if info is not None:
        params = SamplingParams().with_defaults(info.sampling_defaults.values)
        defaults = DefaultSampling.model_validate(params, from_attributes=True)
    return ModelCard(
        id=shown,
        aliases=models.names.aliases_of(shown),
        display_name=shown,
        created=(created := entry.created if adapter is None else adapter.created),
        created_at=datetime.fromtimestamp(created, timezone.utc),
        root=entry.config.model if adapter is None else adapter.source,
        parent=None if adapter is None else adapter.parent,
        max_model_len=info.max_model_len if info is not None else None,
        default_sampling_params=defaults,
        default_sampling_source=info.sampling_defaults.source if info is not None else None,
        state=entry.state,
        loading=entry.loading,
        reason=str(entry.last_error) if entry.last_error is not None else None,
        architecture=info.architecture if info is not None else None,
        memory=Memory.model_validate(info, from_attributes=True) if info is not None else None,
        max_num_seqs=entry.config.max_num_seqs,
        has_chat_template=model.tokenizer.chat_template is not None if model is not None else None,
        tool_format=model.tool_format.name if model is not None and model.tool_format is not None else None,
        input_modalities=None if info is None else ["text", *["image"] * (info.images is not None)],
        pdf_as=None if info is None else _pdf_as(info),
    )


def _pdf_as(info: ModelInfo) -> Literal["pages", "text"]:
    return "text" if is_read_as_text(info.pdf_as, sees=info.images is not None) else "pages"
