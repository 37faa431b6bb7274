"""transformers in bfloat16, eager, with its own cache and attention, as a peer. Reads what `convert.py` wrote."""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Generated, LoadOptions, serve


class Transformers:
    version = f"transformers {transformers.__version__}, torch {torch.__version__}, bfloat16"

    def load(self, options: LoadOptions) -> None:
        torch.set_num_threads(options.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()

    def decode(self, prompt: list[int], count: int) -> Generated:
        return self.many([prompt], count)

    @torch.inference_mode()
    def many(self, prompts: list[list[int]], count: int) -> Generated:
        """Run one batch of equally long prompts that go through all steps together."""
        start = time.perf_counter()
        output = self._model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        steps = [output.logits[:, -1].argmax(dim=-1, keepdim=True)]
        first = time.perf_counter()
        for _ in range(count):
            output = self._model(input_ids=steps[-1], past_key_values=output.past_key_values, use_cache=True)
            steps.append(output.logits[:, -1].argmax(dim=-1, keepdim=True))
        end = time.perf_counter()
        return Generated(first - start, end - first, torch.cat(steps, dim=1).tolist())


if __name__ == "__main__":
    serve(Transformers())
