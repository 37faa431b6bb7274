"""Benchmarks: `latency` of one batch, `throughput` of many prompts, `profile` of single steps.

`DEFINITIONS` defines every figure.
"""

from octavo.bench.profile import ProfileReport, StepProfile, profile
from octavo.bench.requests import DEFINITIONS, LatencyReport, Spread, ThroughputReport, latency, throughput

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
