"""Tasks: the harness's formats, likelihoods against the reference backend, and the harness itself where it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.quality.harness import Share, run_task
from octavo.quality.language_model import LanguageModel
from octavo.quality.measured_servers import ServerProcess, first_model, free_port
from octavo.quality.tasks import flexible_answer, is_same_answer, read_task, strict_answer
from octavo.quality.windows import Window
from tests.quality.test_text_quality import exact_logprobs
from tests.support.processes import octavo_here


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[LanguageModel]:
    with LanguageModel(EngineConfig(model=str(tiny), num_threads=1)) as loaded:
        yield loaded


def test_hellaswag(tmp_path: Path) -> None:
    record = {
        "activity_label": "Roof",
        "ctx_a": "A man  sits [x].",
        "ctx_b": "he",
        "endings": [" is [step]up", "falls [title] ouch"],
        "label": "1",
    }
    [question] = read_task(write(tmp_path / "t.jsonl", record)).questions
    assert question.context == "Roof: A man sits . He"
    assert question.continuations == (" is up", " falls. ouch")
    assert (question.choices, question.gold) == (("is up", "falls. ouch"), 1)
    plain = {"ctx": "A man", "endings": ["a", "b"], "label": 0}
    assert read_task(write(tmp_path / "t.jsonl", plain)).questions[0].context == "A man"


def test_arc_in_both_of_its_shapes(tmp_path: Path) -> None:
    choices = {"text": ["red", "blue"], "label": ["A", "B"]}
    hub = {"question": "Sky?", "choices": choices, "answerKey": "B"}
    entries = [{"text": "red", "label": "1"}, {"text": "blue", "label": "2"}]
    own = {"question": {"stem": "Sky?", "choices": entries}, "answerKey": "2"}
    for record in (hub, own):
        [question] = read_task(write(tmp_path / "t.jsonl", record)).questions
        assert question.contexts == ("Question: Sky?\nAnswer:",) * 2
        assert (question.continuations, question.gold) == ((" red", " blue"), 1)


def test_mmlu_winogrande_and_gsm8k(tmp_path: Path) -> None:
    mmlu = {"question": " Two? ", "choices": ["1", "2", "3", "4"], "answer": "B", "subject": "maths"}
    [question] = read_task(write(tmp_path / "t.jsonl", mmlu)).questions
    assert question.context == "Two?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    assert (question.continuations, question.gold) == ((" A", " B", " C", " D"), 1)
    winogrande = {"sentence": "Ann thanked Bea because _ helped.", "option1": "Ann", "option2": "Bea", "answer": "2"}
    task = read_task(write(tmp_path / "t.jsonl", winogrande))
    [question] = task.questions
    assert question.contexts == ("Ann thanked Bea because Ann", "Ann thanked Bea because Bea")
    assert (question.continuations, question.gold, task.has_lengths) == ((" helped.",) * 2, 1, False)
    gsm8k = [{"question": f"{i} + 1?", "answer": f"It is. #### {i + 1}"} for i in range(3)]
    task = read_task(write(tmp_path / "t.jsonl", *gsm8k), few_shot=2)
    [question] = task.questions
    shown = "Question: 0 + 1?\nAnswer: It is. #### 1\n\nQuestion: 1 + 1?\nAnswer: It is. #### 2\n\n"
    assert question.context == shown + "Question: 2 + 1?\nAnswer:"
    assert read_task(write(tmp_path / "t.jsonl", *gsm8k), limit=2).questions[1].context == "Question: 1 + 1?\nAnswer:"


def test_answers_are_compared_as_the_harness_does() -> None:
    text = "He has 3 and 1,200.50 left.\n#### 1,200"
    assert strict_answer(text) == "1,200"
    assert flexible_answer("so $18 it is.") == "$18"
    assert flexible_answer("none") == strict_answer("18") == "[invalid]"
    assert is_same_answer("$1,200.", "bla #### 1200")
    assert not is_same_answer("12", "bla #### 1200")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "line 2 is not valid JSON"),
        (b"\xff", "line 2 is not valid JSON"),
        (b"[1]", "line 2 is not a JSON object"),
        (b'{"a": 1}', "line 2 has the fields a, which match none of the formats: HellaSwag"),
        (b'{"query": "a", "choices": ["b"], "gold": 0}', "line 2: choices is"),
        (b'{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 2: gold is 2, which names none of the 2 choices"),
        (b'{"query": 1, "choices": ["b", "c"], "gold": 0}', "line 2: query is 1, not a string"),
        (b'{"question": "a", "answer": "b"}', "line 2 is of the format gsm8k, but earlier lines are of choices"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, words: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_bytes(b'{"query": "a", "choices": ["b", "c"], "gold": 0}\n' + line + b"\n")
    done = octavo_here("eval", tiny, "--task", path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_without_enough_questions(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no questions"):
        read_task(write(tmp_path / "t.jsonl"))
    one = {"query": "a", "choices": ["b", "c"], "gold": 0}
    with pytest.raises(UsageError, match="has 1 questions, too few for 1 examples"):
        read_task(write(tmp_path / "t.jsonl", one), few_shot=1)
    with pytest.raises(UsageError, match="No such file"):
        read_task(tmp_path / "none.jsonl")


QUESTIONS = [
    {"query": "abcdabcd" * 3, "choices": ["ab", "c", "dd"], "gold": 0},
    {"query": "abcdabcd" * 3 + "a", "choices": ["a", "bcd", "d"], "gold": 2},
    {"query": "", "choices": ["a", "b"], "gold": 1},
    {"query": "ba", "choices": ["cd", "ab", "ca", "cb"], "gold": 1},
]


def test_choices_are_scored_as_the_reference_backend_scores_them(
    model: LanguageModel, tiny: Path, tmp_path: Path
) -> None:
    """The contexts of the first two questions are long enough to be shared through the prefix cache."""
    report = run_task(model, read_task(write(tmp_path / "t.jsonl", *QUESTIONS)))
    plain, normalized = [], []
    for question in QUESTIONS:
        sums = []
        for choice in question["choices"]:
            context, continuation = model.encode_pair(question["query"], " " + choice)
            exact = exact_logprobs(tiny, Window([*context, *continuation], 1, 0))[len(context) - 1 :]
            sums.append(exact[range(len(continuation)), continuation].sum())
            [found] = model.likelihoods([(context, continuation)])
            assert found.logprob == pytest.approx(sums[-1], abs=2e-2)
            assert found.is_greedy == (exact.argmax(axis=1) == continuation).all()
        plain.append(int(np.argmax(sums)) == question["gold"])
        lengths = [len(choice) for choice in question["choices"]]
        normalized.append(int(np.argmax(np.array(sums) / lengths)) == question["gold"])
    assert report.figures == {"acc": Share.of(plain), "acc_norm": Share.of(normalized)}
    hits = np.array(plain, float)
    assert report.figures["acc"].standard_error == pytest.approx(hits.std(ddof=1) / np.sqrt(len(hits)))


def test_long_contexts_lose_their_beginning_and_long_answers_are_refused(model: LanguageModel) -> None:
    context, continuation = [2, 3, 4, 5] * 30, [3, 2]
    before = model.num_truncated
    [long] = model.likelihoods([(context, continuation)])
    assert model.num_truncated == before + 1
    [short] = model.likelihoods([(context[-(model.max_length - 2) :], continuation)])
    assert long == short
    with pytest.raises(UsageError, match="continuation 1 has 120 tokens; at most"):
        model.likelihoods([([2], context)])
    with pytest.raises(UsageError, match="continuation 2 has no tokens"):
        model.likelihoods([([2], [3]), ([2], [])])


def test_answers_are_generated(tiny: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"question": "ab", "answer": "x #### 3"} for _ in range(2)))
    [report] = json.loads(octavo_here("eval", tiny, "--task", path, "--json").stdout)
    assert report["kind"] == "gsm8k"
    assert report["figures"]["strict_match"] == {"value": 0.0, "standard_error": 0.0}
    assert "flexible_extract" in octavo_here("eval", tiny, "--task", path).stdout


_SCRIPT = """
import json
import lm_eval
from lm_eval.tasks import TaskManager
import lm_eval.models
import octavo.quality.lm_eval
tasks = TaskManager(include_path={folder!r}, include_defaults=False)
results = lm_eval.simple_evaluate(
    model={model!r}, model_args={arguments!r}, tasks={names!r}, task_manager=tasks, log_samples=False
)
print("RESULTS " + json.dumps(results["results"], default=str))
"""


def harness_results(folder: Path, names: list[str], model: str, arguments: dict[str, object]) -> dict[str, dict]:
    script = _SCRIPT.format(folder=str(folder), model=model, arguments=arguments, names=names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


@pytest.fixture(scope="module")
def harness_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of choices and one of answers, as the harness's own configuration files write them."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is not installed: pip install 'octavo[eval]'")
    folder = tmp_path_factory.mktemp("tasks")
    data = {name: write(folder / f"{name}.jsonl", *records) for name, records in _RECORDS.items()}
    for name, body in _YAML.items():
        common = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data[name]}\n"
        (folder / f"{name}.yaml").write_text(common + "test_split: test\n" + body)
    return folder


_RECORDS: dict[str, list[dict[str, object]]] = {
    "octavo_choices": [q for q in QUESTIONS if q["query"]],
    "octavo_answers": [{"question": "ab" * i, "answer": "x #### 3"} for i in range(1, 4)],
}
_YAML = {
    "octavo_choices": """output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "octavo_answers": """output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], do_sample: false, max_gen_toks: 16}
metric_list:
  - metric: exact_match
""",
}


@pytest.mark.slow
def test_the_harness_finds_the_same_with_the_model_and_through_a_server(harness_folder: Path, tiny: Path) -> None:
    """Two runs of the real package, of 20 seconds each: most of it is its import."""
    path = harness_folder / "octavo_choices.jsonl"
    [own] = json.loads(octavo_here("eval", tiny, "--task", path, "--json").stdout)
    alone = harness_results(harness_folder, list(_YAML), "octavo", {"pretrained": str(tiny), "num_threads": 1})
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", str(tiny), "--port", str(port), "--num-threads", "1"]
    server = ServerProcess("octavo", command, port, harness_folder / "server.log")
    try:
        server.wait_ready()
        arguments = {"model": first_model(server.url), "base_url": f"{server.url}/v1/completions", "max_length": 63}
        served = harness_results(harness_folder, list(_YAML), "local-completions", arguments)
    finally:
        server.close()
    for found in (alone, served):
        for name in ("acc", "acc_norm"):
            assert found["octavo_choices"][f"{name},none"] == pytest.approx(own["figures"][name]["value"])
            error = found["octavo_choices"][f"{name}_stderr,none"]
            assert error == pytest.approx(own["figures"][name]["standard_error"])
        assert found["octavo_answers"]["exact_match,none"] == 0
