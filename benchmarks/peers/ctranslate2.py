"""CTranslate2 with int8 weights as a peer. Reads what `convert.py` wrote."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import ctranslate2
from protocol import Generated, LoadOptions, serve


class CTranslate2:
    version = ""

    def load(self, options: LoadOptions) -> None:
        self._generator = ctranslate2.Generator(
            options.model, device="cpu", intra_threads=options.threads, inter_threads=1
        )
        # Its own loops and oneDNN's products have a limit each; without one, each takes the best that it knows.
        limits = {"own loops": "CT2_FORCE_CPU_ISA", "products": "ONEDNN_MAX_CPU_ISA"}
        sets = ", ".join(f"{part}: {os.environ.get(name, 'best')}" for part, name in limits.items())
        self.version = f"ctranslate2 {ctranslate2.__version__}, {self._generator.compute_type} ({sets})"
        # It takes tokens by their text only.
        self._texts: list[str] = json.loads((Path(options.model) / "vocabulary.json").read_text(encoding="utf-8"))

    def decode(self, prompt: list[int], count: int) -> Generated:
        return self.many([prompt], count)

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        """Run one batch of equally long prompts that go through all steps together."""
        times: list[float] = []

        def note(_: ctranslate2.GenerationStepResult) -> bool:
            times.append(time.perf_counter())
            return False

        start = time.perf_counter()
        results = self._generator.generate_batch(
            [[self._texts[token] for token in prompt] for prompt in prompts],
            include_prompt_in_result=False,
            min_length=count + 1,
            max_length=count + 1,
            callback=note,
        )
        first = times[len(prompts) - 1]  # every sequence has its first token
        return Generated(first - start, time.perf_counter() - first, [result.sequences_ids[0] for result in results])


if __name__ == "__main__":
    serve(CTranslate2())
