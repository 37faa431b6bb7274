"""Python loads this automatically when a test puts its directory on the path: ranked models then accept spans."""

from __future__ import annotations

import sys

if any("octavo.engine.ranks.rank_process" in each for each in sys.orig_argv):
    from octavo.graph.builder import Graph
    from octavo.graph.spans import splice_spans

    embedding = Graph.embedding
    Graph.embedding = lambda g, stem, **options: splice_spans(g, embedding(g, stem, **options))  # type: ignore[method-assign]
