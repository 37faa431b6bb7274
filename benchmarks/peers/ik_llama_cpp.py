"""ik_llama.cpp through its `llama-bench`, which must be on the PATH, as a peer: one stream of tokens.

Each figure is a run of `llama-bench` with its own warm-up. The first run of a kind of figure tries all settings of
run-time repacking and flash attention; the fastest of them is used for that figure from then on. `llama-bench` feeds
random tokens and does not say which: the tokens of the answers are placeholders of the number that it has computed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from protocol import Generated, LoadOptions, serve

SETTINGS = ("0,1", "0,1")  # of -rtr and -fa
PLACEHOLDER = 0


class IkLlamaCpp:
    version = ""

    def load(self, options: LoadOptions) -> None:
        program = shutil.which("llama-bench")
        if program is None:
            raise RuntimeError("ik_llama.cpp's llama-bench is not on the PATH: build it, and put its folder there")
        self._command = [program, "-m", options.model, "-t", str(options.threads), "-r", "1", "-o", "json"]
        self._best: dict[tuple[str, ...], tuple[str, str]] = {}
        self.version = f"ik_llama.cpp {self._fastest('-p', '1', '-n', '0')['build_commit']}"

    def decode(self, prompt: list[int], count: int) -> Generated:
        """Run the prompt and the steps after it separately, because `llama-bench` times only one of them."""
        read = self._fastest("-p", str(len(prompt)), "-n", "0")
        first_s, steps_s, generated = int(read["avg_ns"]) / 1e9, 0.0, 0
        if count:
            written = self._fastest("-p", "0", "-n", "0", "-gp", f"{len(prompt)},{count}")
            steps_s, generated = int(written["avg_ns"]) / 1e9, int(written["n_gen"])
        return Generated(first_s, steps_s, [[PLACEHOLDER] * (1 + generated)])

    def many(self, prompts: list[list[int]], count: int) -> Generated:
        raise NotImplementedError("llama-bench runs one stream")

    def _fastest(self, *test: str) -> dict[str, Any]:
        """Return the fastest result of a test, with the best settings if they are known."""
        repack, flash = self._best.get(test, SETTINGS)
        done = subprocess.run(
            [*self._command, *test, "-rtr", repack, "-fa", flash], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
        best: dict[str, Any] = min(json.loads(done.stdout), key=lambda result: int(result["avg_ns"]))
        self._best[test] = str(int(best["repack"])), str(int(best["flash_attn"]))
        return best


if __name__ == "__main__":
    serve(IkLlamaCpp())
