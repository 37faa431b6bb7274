"""Ranks never pickle: what they send is MessagePack, which holds values and no code."""

from __future__ import annotations

import _pickle
import ast
import pickle
from pathlib import Path

import pytest

import octavo
from octavo import LLM
from tests.engine.test_ranks import OPTIONS, children
from tests.support.engine_answers import answers
from tests.support.text_models import save_decoder
from tests.support.witness import on_path

ROOT = Path(octavo.__file__).parent
# All that writes or reads what passes between ranks, and between the server and its engine.
CROSSING = [
    *(ROOT / "distributed").glob("*.py"),
    *(ROOT / "engine" / "ranks").glob("*.py"),
    *(ROOT / "core").glob("*.py"),
]
UNSAFE = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve"}


def imports(source: str) -> set[str]:
    """The first names of all modules that are imported anywhere in the source, also by their names as text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name.partition(".")[0] for name in found}


def test_no_module_of_the_ranks_imports_one_that_pickles() -> None:
    assert len(CROSSING) > 15
    assert imports("def f():\n from pickle import loads\nimportlib.import_module('shelve')") & UNSAFE == {
        "pickle",
        "shelve",
    }
    for path in CROSSING:
        assert not imports(path.read_text()) & UNSAFE, path


def test_the_functions_that_evaluate_are_not_called() -> None:
    """allow_pickle of numpy, eval, exec."""
    for path in CROSSING:
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        assert not calls & {"eval", "exec", "compile", "np.load", "np.save"}, path


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_ranks_answer_where_nothing_can_be_pickled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """The options, batches, sampling options and values between stages of all kinds of requests."""
    model, marks = save_decoder(tmp_path), tmp_path / "marks"
    marks.mkdir()
    for name, value in on_path("no_pickle").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OCTAVO_TEST_MARKS", str(marks))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the first rank has pickled something, or read what was")

    options = {**OPTIONS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with monkeypatch.context() as patched:
        for module in (pickle, _pickle):
            for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
                patched.setattr(module, name, refuse)
        with LLM(str(model), kv_cache_memory=(40 << 10) // tensor // pipeline, **options) as llm:
            ranks = children()
            assert len(answers(llm)) > 4
    assert len(ranks) == tensor * pipeline - 1
    assert {int(mark.name) for mark in marks.iterdir()} >= set(ranks)
