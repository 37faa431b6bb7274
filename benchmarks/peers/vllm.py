"""vLLM's CPU build in bfloat16 as a peer, its engine in this process. Reads what `convert.py` wrote."""

from __future__ import annotations

import os
import time

# Read when vLLM is imported: an engine process of its own could not be put ahead of others, nor be timed step by step.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import torch
import vllm
from protocol import Generated, LoadOptions, serve


class Vllm:
    version = f"vllm {vllm.__version__}, torch {torch.__version__}, bfloat16"

    def load(self, options: LoadOptions) -> None:
        torch.set_num_threads(options.threads)  # an engine in this process binds no threads itself
        self._llm = vllm.LLM(
            model=options.model,
            dtype="bfloat16",
            max_model_len=options.context,
            max_num_seqs=options.sequences,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._requests = 0

    def decode(self, prompt: list[int], count: int) -> Generated:
        return self.many([prompt], count)

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        engine = self._llm.llm_engine
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count + 1, ignore_eos=True, detokenize=False)
        answers: dict[str, list[int]] = {}
        start = time.perf_counter()
        for prompt in prompts:
            name = str(self._requests)
            self._requests += 1
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            answers[name] = []
        first = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if not first and all(answers.values()):
                first = time.perf_counter()
        return Generated(first - start, time.perf_counter() - first, list(answers.values()))


if __name__ == "__main__":
    serve(Vllm())
