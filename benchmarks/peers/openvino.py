"""OpenVINO GenAI, which reads some GGUF files, as a peer: continuous batching without its prefix cache."""

from __future__ import annotations

import itertools
import time

import numpy as np
import openvino
import openvino_genai
from protocol import Generated, LoadOptions, serve

UNLIMITED = 2**31  # tokens of one step, as where the library makes the configuration itself


class OpenVino:
    version = f"openvino-genai {openvino_genai.get_version()}"

    def load(self, options: LoadOptions) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = UNLIMITED
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
        )
        self._ids = itertools.count()

    def decode(self, prompt: list[int], count: int) -> Generated:
        return self.many([prompt], count)

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = count + 1
        settings.ignore_eos = True
        settings.do_sample = False
        start = time.perf_counter()
        requests = [
            self._pipeline.add_request(next(self._ids), openvino.Tensor(np.array([prompt], np.int64)), settings)
            for prompt in prompts
        ]
        first = 0.0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if not first and all(request.can_read() for request in requests):
                first = time.perf_counter()
        end = time.perf_counter()
        answers = [list(request.read_all()[0].generated_ids) for request in requests]
        return Generated(first - start, end - first, answers)


if __name__ == "__main__":
    serve(OpenVino())
