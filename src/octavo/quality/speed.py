"""Measures one model's speed and memory in a separate process: `python -m octavo.quality.speed OPTIONS_AS_JSON`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.platform import memory
from octavo.quality.language_model import LanguageModel

PROMPT_TOKENS, SHORT_PROMPT_TOKENS, OUTPUT_TOKENS = 512, 16, 64
_CONTEXT = 1024
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed and memory of a model.

    decode: tokens per second in single-token steps after a short prompt.
    prefill: tokens per second for one prompt of 512 tokens.
    peak_bytes: peak resident set of the process with a cache of 1,024 tokens, including mapped pages.
    """

    decode: float
    prefill: float
    peak_bytes: int


def measure_speed(model: str, options: Mapping[str, Any]) -> Speed:
    """Load the model in this process and measure it once, after a warm-up."""
    defaults = {"max_model_len": _CONTEXT, "max_num_seqs": 1, "max_itl": 0, "enable_prefix_caching": False}
    with LanguageModel(EngineConfig.resolve(model, {**defaults, **options})) as asked:
        rng = np.random.default_rng(0)

        def prompt(count: int) -> list[int]:
            return [int(token) for token in rng.integers(0, asked.tokenizer.vocab_size, count)]

        asked.timed(prompt(SHORT_PROMPT_TOKENS), 4)
        long = asked.timed(prompt(PROMPT_TOKENS), 1)
        short = asked.timed(prompt(SHORT_PROMPT_TOKENS), OUTPUT_TOKENS)
        return Speed(
            decode=(short.num_generated_tokens - 1) / short.decode_s,
            prefill=PROMPT_TOKENS / long.prefill_s,
            peak_bytes=memory.peak_bytes(),
        )


def speed_of(model: str, options: Mapping[str, Any]) -> Speed:
    """Measure the model in a new process. Raises OctavoError with the last line of its standard error if that fails."""
    arguments = json.dumps({"model": model, "options": dict(options)})
    command = [sys.executable, "-m", "octavo.quality.speed", arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise OctavoError(f"{model}: the measurement ended with status {done.returncode}: {lines[-1]}")
    return Speed(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print the figures as one line of JSON."""
    wanted = json.loads(sys.argv[1])
    try:
        sys.stdout.write(json.dumps(asdict(measure_speed(wanted["model"], wanted["options"]))) + "\n")
    except OctavoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
