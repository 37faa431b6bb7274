"""A loaded model in a forked process, pickled, or copied: a clear error at once, and no harm to the parent."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams, UsageError

PROGRAM = """
import os, sys
from octavo import LLM, SamplingParams, UsageError

greedy = SamplingParams(temperature=0, max_tokens=4)
with LLM(sys.argv[1]) as llm:
    before = llm.generate("Once", greedy)[0].outputs[0].text
    llm.encode_chat([{"role": "user", "content": "Hi"}])
    child = os.fork()
    if child == 0:
        refused = 0
        stream = lambda prompt, params: list(llm.stream(prompt, params))
        chat = lambda prompt, _: llm.encode_chat([{"role": "user", "content": prompt}])
        for call in (llm.generate, stream, chat):
            try:
                call("Once", greedy)
            except UsageError as error:
                refused += "forked after the model was loaded" in str(error)
        llm.close()
        sys.exit(10 + refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    assert llm.generate("Once", greedy)[0].outputs[0].text == before
    assert llm.encode_chat([{"role": "user", "content": "Hi"}])
print("ok")
"""


def test_a_forked_process_is_told(smollm2_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(smollm2_path)]
    outcome = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (outcome.stdout, outcome.returncode) == ("ok\n", 0), outcome.stderr


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_loaded_model_is_not_copied(copied: object, smollm2_path: Path) -> None:
    with LLM(str(smollm2_path)) as llm:
        with pytest.raises(UsageError, match="cannot be pickled or deep-copied"):
            copied(llm)  # type: ignore[operator]
        assert llm.generate("Once", SamplingParams(max_tokens=2))
