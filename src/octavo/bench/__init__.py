"""Benchmarks: `latency` of one batch, `throughput` of many prompts, `profile` of steps, and gain by `speculation`.

`DEFINITIONS` defines every figure.
"""

from octavo.bench.profile import ProfileReport, StepProfile, profile
from octavo.bench.requests import DEFINITIONS, LatencyReport, Spread, ThroughputReport, latency, throughput
from octavo.bench.speculation import KindReport, SpeculationReport, speculation

__all__ = [
    "DEFINITIONS",
    "KindReport",
    "LatencyReport",
    "ProfileReport",
    "SpeculationReport",
    "Spread",
    "StepProfile",
    "ThroughputReport",
    "latency",
    "profile",
    "speculation",
    "throughput",
]
