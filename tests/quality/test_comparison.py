"""Models and engines beside each other."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.bench import Spread
from octavo.cli.compare import compare
from octavo.errors import ModelWriteError
from octavo.quality import engine_comparison
from octavo.quality.answers_page import answers_page
from octavo.quality.engine_comparison import (
    EngineFigures,
    EngineOptions,
    EngineSpec,
    compare_engines,
    read_prompts,
)
from octavo.quality.evaluation import ReferenceOptions, WindowOptions
from octavo.quality.measured_servers import ServerError, StreamedAnswer
from octavo.quality.model_comparison import (
    ComparedModel,
    ComparisonOptions,
    ModelComparison,
    compare_models,
    pareto_front,
    recommend,
)
from octavo.quality.plots import write_plots
from octavo.quality.speed import Speed
from octavo.quality.texts import read_text
from tests.support.processes import octavo_here

GIB = 1 << 30


@pytest.fixture(scope="module")
def comparison(tiny: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelComparison:
    """Two models, the first of which is the reference; their speeds are invented."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "text.txt").write_text("abcd ab dc" * 30)
    reference = ReferenceOptions(str(tiny), {}, folder=folder / "kept")
    options = ComparisonOptions(WindowOptions(size=16), reference, {}, turns=2)
    asked: list[str] = []

    def measure(model: str, _: object) -> Speed:
        asked.append(Path(model).name)
        return Speed(decode=10.0 * len(asked), prefill=100.0, peak_bytes=GIB)

    found = compare_models(
        [("tiny", tiny), ("other", other)], read_text(folder / "text.txt"), options, 4 * GIB, measure=measure
    )
    assert asked == ["tiny.gguf", "other.gguf"] * 2  # in turns
    return found


def test_models_have_their_figures_and_their_front(comparison: ModelComparison, tiny: Path) -> None:
    first, second = comparison.models
    assert first.num_bytes == tiny.stat().st_size
    assert first.bits_per_weight == 32
    assert first.distance < 1e-4 < second.distance
    assert (first.decode, second.decode) == (Spread.of([10, 30]), Spread.of([20, 40]))
    assert (first.is_best_by_size, second.is_best_by_size) == (True, False)  # of the same size, the closer one
    assert (first.is_best_by_speed, second.is_best_by_speed) == (True, True)
    assert comparison.recommendation.startswith("use tiny: the fastest among those that fit 4.00 GiB with a mean KL of")


def test_the_front_and_the_recommendation(comparison: ModelComparison) -> None:
    assert pareto_front([(1, 5), (2, 3), (3, 3), (4, 1), (4, 1), (5, 2)]) == {0, 1, 3, 4}
    first, second = comparison.models
    small = replace(first, name="small", peak_bytes=GIB // 2, decode=Spread.of([5]))
    assert recommend([first, small], GIB * 3 // 4).startswith("use small: ")
    assert "none of these models fits the 1.0 MiB" in recommend([first, small], 1 << 20)
    assert recommend([second], 4 * GIB).startswith("use other: the closest to the reference")
    bare = [replace(m, report=replace(m.report, divergence=None), decode=None) for m in comparison.models]
    assert "the smallest among those that fit 4.00 GiB with a perplexity within 2 % of the best" in recommend(
        bare, 4 * GIB
    )


def test_plots(comparison: ModelComparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    named = replace(comparison, models=tuple(replace(m, name=f"$x_{m.name}<") for m in comparison.models))
    names = {path.name for path in write_plots(named, tmp_path)}
    stems = ("perplexity_by_size", "distance_by_speed")
    assert names == {stem + suffix for stem in stems for suffix in (".svg", ".png")}
    assert (tmp_path / "perplexity_by_size.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "distance_by_speed.svg").read_text()
    types = replace(comparison, models=tuple(replace(m, name=f"model.{m.name}") for m in comparison.models))
    write_plots(types, tmp_path)
    drawn = (tmp_path / "perplexity_by_size.svg").read_text()
    assert ">model: perplexity by size</text>" in drawn
    assert ">tiny</text>" in drawn


def test_plots_on_a_full_disk_stay_as_they_were(
    comparison: ModelComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "perplexity_by_size.svg").write_text("older")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ModelWriteError, match=r"perplexity_by_size.svg.partial: No space left on device"):
        write_plots(comparison, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("perplexity_by_size.svg", "older")]


def test_without_matplotlib_the_table_stands_alone(
    tiny: Path, other: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    options = ("--text", text, "--window", "16", "--reference", tiny, "--turns", "0", "--plots", tmp_path / "plots")
    done = octavo_here("compare", tiny, other, *options)
    assert done.returncode == 0, done.stderr
    assert "pip install 'octavo[report]'" in done.stderr
    for words in ("tiny", "other", "KL mean", "front", "use tiny: the smallest among those that fit"):
        assert words in done.stdout


def test_types_are_made_once(tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    options = ("--reference", tiny, "--types", "q8_0,q4_0", "--text", text, "--window", "16", "--turns", "0", "--json")
    times = []
    for _ in range(2):
        done = octavo_here("compare", *options)
        assert done.returncode == 0, done.stderr
        times.append([path.stat().st_mtime_ns for path in sorted((tmp_path / "cache").rglob("*.gguf"))])
    eight, four = json.loads(done.stdout)["models"]
    assert (eight["name"], four["name"]) == ("tiny.q8_0", "tiny.q4_0")
    assert eight["num_bytes"] > four["num_bytes"]
    assert 0 < eight["report"]["divergence"]["mean_kl"] < four["report"]["divergence"]["mean_kl"]
    assert len(times[0]) == 2
    assert times[0] == times[1]
    wrong = octavo_here("compare", *options[:3], "q8_0,q9", *options[4:])
    assert wrong.returncode == 2
    assert "type 'q9' is unknown" in wrong.stderr


def test_speed_is_measured_in_a_process_of_its_own(other: Path, text: Path) -> None:
    """The tiny model's context of 64 tokens is raised with a warning."""
    done = octavo_here(
        "compare", other, "--text", text, "--window", "16", "--turns", "1", "--json", "--num-threads", "1"
    )
    [model] = json.loads(done.stdout)["models"]
    assert min(model["decode"]["median"], model["prefill"]["median"]) > 1
    assert 10 << 20 < model["peak_bytes"] < GIB


class _Answers(BaseHTTPRequestHandler):
    """Two pieces of text for every prompt; fields that it does not know are refused as OpenAI does it.

    The first request, which no figure is of, ends without text: so may any model.
    """

    def do_GET(self) -> None:
        self._send(200, "application/json", b'{"data": [{"id": "m<1>"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "ignore_eos" in body or self.headers["Authorization"] != "Bearer secret":
            self._send(400, "application/json", b'{"error": "unknown field"}')
            return
        usage = {"completion_tokens": 5}
        events = [
            {"choices": [{"text": "<b>one"}]},
            {"choices": [{"text": " two & three"}]},
            {"choices": [], "usage": usage},
        ]
        if body["prompt"] == "Hello":
            events = events[2:]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(200, "text/event-stream", lines.encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_without_text_has_no_figures(foreign: str) -> None:
    engines = [EngineSpec.parse(f"other={foreign}")]
    with pytest.raises(ServerError, match=r"http://127.0.0.1:\d+ ended its answer without any text"):
        compare_engines(engines, None, ["Hello"], EngineOptions(turns=1, api_key="secret"))


@pytest.fixture
def foreign() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_engines_take_turns_and_answers_are_side_by_side(
    tiny: Path, foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`octavo serve` itself, and a server of somebody else."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setattr(engine_comparison, "PAUSE_S", 0)
    (tmp_path / "prompts.txt").write_text("ab cd\n---\n<script>alert(1)</script>\nabab\n")
    engines = ("--engine", "octavo", "--engine", f"other={foreign}/v1", "--num-threads", "1", "--max-tokens", "4")
    files = ("--prompts", tmp_path / "prompts.txt", "--html", tmp_path / "answers.html")
    done = octavo_here("compare", tiny, *engines, *files, "--turns", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompts"] == ["ab cd", "<script>alert(1)</script>\nabab"]
    own, other = report["engines"]
    assert (own["num_tokens"], other["num_tokens"]) == (2 * 2 * 4, 2 * 2 * 5)
    assert own["ratio"] is None
    assert other["ratio"]["median"] > 0
    assert other["answers"] == ["<b>one two & three"] * 2
    assert len(own["answers"]) == 2
    assert other["notes"][0] == "answers end with the end of the text"
    page = (tmp_path / "answers.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;one two &amp; three" in page
    assert "<script" not in page
    assert "<b>" not in page


def test_engines_take_turns_at_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine changes; the ratios and the spread are those of the turns."""
    asked: list[tuple[str, str]] = []

    def answer(url: str, body: dict[str, object], _: object) -> StreamedAnswer:
        """Eleven tokens in one second by a; by b in two seconds, and in three in the second turn."""
        if body["prompt"] == "Hello":
            return StreamedAnswer(0.0, [1.0], "x", 1)
        asked.append((url[-1], str(body["prompt"])))
        seconds = 1.0 if url[-1] == "a" else 2.0 + (len(asked) - 1) // 4
        return StreamedAnswer(0.0, [0.5, seconds], "xy", 11)

    monkeypatch.setattr(engine_comparison, "PAUSE_S", 0)
    monkeypatch.setattr(engine_comparison, "first_model", lambda *_: "m")
    monkeypatch.setattr(engine_comparison, "stream_completion", answer)
    specs = [EngineSpec.parse(f"{name}=http://{name}") for name in "ab"]
    first, second = compare_engines(specs, None, ["one", "two"], EngineOptions(turns=2))
    assert ["".join(name for name, _ in asked[i : i + 2]) for i in range(0, 8, 2)] == ["ab", "ba", "ba", "ab"]
    assert [prompt for _, prompt in asked] == ["one", "one", "two", "two"] * 2
    assert (first.tokens_per_s, second.tokens_per_s) == (Spread.of([11, 11]), Spread.of([11 / 2, 11 / 3]))
    assert (first.ratio, second.ratio) == (None, Spread.of([2, 3]))
    assert second.ttft_s == Spread.of([0.5] * 4)
    assert second.tpot_s == Spread.of([0.15, 0.15, 0.25, 0.25])


def test_nine_prompts_and_200_tokens_are_the_default() -> None:
    assert len(set(read_prompts(None))) == 9
    assert EngineOptions().max_tokens == 200
    assert "[default: 200]" in " ".join(CliRunner().invoke(compare, ["--help"]).stdout.split())


LLAMA_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given.keys() == {{"-m", "--host", "--port", "-np", "-c", "-t", "-tb"}}, given
assert int(given["-t"]) == int(given["-tb"]) >= 1
asked = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.answer(503 if asked == ["/health"] else 200, json.dumps({{"data": [{{"id": given["-m"]}}]}}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] != "Hello" and (body["cache_prompt"], body["ignore_eos"]) != (False, True):
            self.answer(400, "not as llama.cpp takes it")
            return
        count = body["max_tokens"]
        events = [{{"choices": [{{"text": "x"}}]}}] * count
        last = {{"text": "", "finish_reason": "length"}}
        events.append({{"choices": [last], "usage": {{"completion_tokens": count}}}})
        self.answer(200, "".join("data: " + json.dumps(e) + "\\n\\n" for e in events) + "data: [DONE]\\n\\n")

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def test_llama_cpp_is_started_and_asked_as_its_server_wants_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the options, the states while loading, and the events of `llama-server`."""
    monkeypatch.setattr(engine_comparison, "PAUSE_S", 0)
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    prompts = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", "3", "--turns", "1", "--json")
    prompts[1].write_text("ab\n---\ncd")
    done = octavo_here("compare", tiny, "--engine", f"llama.cpp={program}", *prompts)
    assert done.returncode == 0, done.stderr
    [engine] = json.loads(done.stdout)["engines"]
    assert (engine["model"], engine["num_tokens"], engine["answers"]) == (str(tiny), 2 * 3, ["xxx"] * 2)
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('error: unknown model architecture')")
    done = octavo_here("compare", tiny, "--engine", f"llama.cpp={program}", *prompts)
    assert done.returncode != 0
    assert done.stderr.strip().endswith("llama.cpp ended with status 1: error: unknown model architecture")


def test_a_page_escapes_everything() -> None:
    spread = Spread.of([1.0])
    figures = EngineFigures("<i>", "<u>", spread, spread, spread, 1, answers=["<s>"])
    page = answers_page(["<p>"], [figures])
    assert not any(tag in page for tag in ("<i>", "<u>", "<s>", "<p>"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to compare: name models"),
        (("--types", "q8_0"), "--types needs --reference"),
        (("--engine", "vllm"), "is unknown; give octavo, llama.cpp=PROGRAM or NAME=http://HOST:PORT"),
        (("--engine", "llama.cpp=/nowhere"), "/nowhere is not a program"),
        (("--engine", "octavo"), "is started here and needs a MODEL"),
        (("--engine", "octavo", "--reference", "m"), "--reference is for models: leave out --engine"),
        (("--engine", "octavo", "--window", "16"), "--window is for models: leave out --engine"),
        (("m", "--reference-cache", "1GiB"), "--reference-cache needs --reference"),
        (("m", "--html", "x"), "--html is for engines: add --engine"),
        (("--engine", "octavo", "--html", "/nowhere/x.html"), "/nowhere: no such directory"),
        (("m", "n", "--engine", "octavo"), "engines are compared with one model, not with 2"),
        (("--engine", "a=http://127.0.0.1:9"), "Connection refused"),
        (("--engine", "a=http://127.0.0.1:9x"), "nonnumeric port: '9x'"),
        (("--engine", "a=http://127.0.0.1:9", "--engine", "a=http://127.0.0.1:9"), "two engines are called a"),
        (("--engine", "octavo", "--prompts", "EMPTY"), "has no prompts"),
        (("--engine", "octavo", "--kv-dtype", "int8"), "--kv-dtype is for models"),
        (("/nowhere/m", "--text", "/nowhere/text"), "/nowhere/text"),  # before the model is looked for
    ],
)
def test_wrong_commands(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n---\n")
    done = octavo_here("compare", *(str(tmp_path / "empty") if word == "EMPTY" else word for word in arguments))
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_compared_models_without_a_reference(comparison: ModelComparison) -> None:
    model: ComparedModel = comparison.models[0]
    bare = replace(model, report=replace(model.report, divergence=None))
    assert bare.distance == model.report.perplexity.perplexity
