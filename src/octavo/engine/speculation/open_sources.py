"""The draft sources of an engine, from its options and its model."""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.engine.loading.cache_plan import wants_drafts
from octavo.engine.loading.devices import backend_name
from octavo.engine.speculation.draft_source import DraftSource
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.speculation.prediction import PredictionSource
from octavo.graph.builder import Graph
from octavo.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def why_no_drafts(config: EngineConfig, graph: Graph, num_draft_states: int) -> str:
    """Return the reason, worded for users, why an engine has no draft sources. Empty if it has some.

    num_draft_states: the cache's slots for states before drafts.
    """
    options = SpeculativeConfig.of(config)
    if not graph.generates:
        return "this model generates no text"
    if options.method == "off":
        return "speculation is off"
    if not wants_drafts(config):
        return f"speculation is auto and makes no drafts on {backend_name(config)}; choose ngram"
    if graph.state_caches and not num_draft_states:
        return "no memory is left for the states before them; lower max_model_len or raise kv_cache_memory"
    return ""


def draft_sources(config: EngineConfig, graph: Graph, num_draft_states: int) -> list[DraftSource]:
    """Return the sources in the order in which they are tried. The list is empty if `why_no_drafts` gives a reason."""
    options = SpeculativeConfig.of(config)
    if reason := why_no_drafts(config, graph, num_draft_states):
        if options.method not in ("auto", "off"):
            logger.warning("no drafts: %s", reason)
        return []
    lookup = (options.prompt_lookup_min, options.prompt_lookup_max)
    most = options.num_speculative_tokens
    return [PredictionSource(most), NgramSource(*lookup, most)]
