"""The draft sources of an engine, from its options and its model."""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_name
from octavo.engine.speculation.draft_source import DraftSource
from octavo.engine.speculation.ngram import NgramSource
from octavo.engine.speculation.prediction import PredictionSource
from octavo.graph.builder import Graph
from octavo.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def draft_sources(config: EngineConfig, graph: Graph) -> list[DraftSource]:
    """The sources in the order in which they are asked; none: no speculation."""
    options = SpeculativeConfig.of(config)
    is_wanted = options.method != "off" and (options.method != "auto" or backend_name(config) == "cpu")
    if not is_wanted or not graph.generates:
        return []
    if graph.state_caches:
        if options.method != "auto":
            logger.warning("no drafts: this model keeps states, which cannot go back to earlier tokens")
        return []
    lookup = (options.prompt_lookup_min, options.prompt_lookup_max)
    most = options.num_speculative_tokens
    return [PredictionSource(most), NgramSource(*lookup, most)]
