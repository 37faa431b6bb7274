"""Benchmarks: `latency` of one batch, `throughput` of many prompts, `profile` of single steps.

`DEFINITIONS` defines every figure.
"""

from octavo.bench.latency import LatencyReport, latency
from octavo.bench.profile import ProfileReport, StepProfile, profile
from octavo.bench.statistics import DEFINITIONS, Spread
from octavo.bench.throughput import ThroughputReport, throughput

__all__ = [
    "DEFINITIONS",
    "LatencyReport",
    "ProfileReport",
    "Spread",
    "StepProfile",
    "ThroughputReport",
    "latency",
    "profile",
    "throughput",
]
