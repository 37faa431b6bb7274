"""OpenVINO GenAI, which reads some GGUF files itself, as a peer: its paged attention, without its prefix cache."""

from __future__ import annotations

import time

import numpy as np
import openvino
import openvino_genai
from protocol import Generated, LoadOptions, serve

UNLIMITED = 2**31  # tokens of one step, as in the configuration that the pipeline makes itself


class Clock(openvino_genai.StreamerBase):
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.first: float | None = None

    def write(self, _tokens: int | list[int]) -> openvino_genai.StreamingStatus:
        if self.first is None:
            self.first = time.perf_counter()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class OpenVino:
    version = f"openvino-genai {openvino_genai.get_version()}"

    def load(self, options: LoadOptions) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = UNLIMITED
        self._pipeline = openvino_genai.LLMPipeline(
            options.model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=options.threads
        )

    @staticmethod
    def _settings(count: int) -> openvino_genai.GenerationConfig:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = count + 1
        settings.ignore_eos = True
        settings.do_sample = False
        return settings

    def decode(self, prompt: list[int], count: int) -> Generated:
        clock = Clock()
        start = time.perf_counter()
        result = self._pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), self._settings(count), clock)
        end = time.perf_counter()
        first = end if clock.first is None else clock.first
        return Generated(first - start, end - first, [list(result.tokens[0])])

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        """The pipeline tells nothing before the end when it has several sequences: all time counts as the first."""
        start = time.perf_counter()
        result = self._pipeline.generate(openvino.Tensor(np.array(prompts, np.int64)), self._settings(count))
        return Generated(time.perf_counter() - start, 0.0, [list(tokens) for tokens in result.tokens])


if __name__ == "__main__":
    serve(OpenVino())
