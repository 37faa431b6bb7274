"""How fast a model is here: `latency` of one batch, `throughput` of many prompts. Every figure is defined."""

from octavo.bench.latency import LatencyReport, latency
from octavo.bench.statistics import DEFINITIONS, Spread
from octavo.bench.throughput import ThroughputReport, throughput

__all__ = ["DEFINITIONS", "LatencyReport", "Spread", "ThroughputReport", "latency", "throughput"]
