"""The server's metrics: vLLM's names, counters that never fall, and a bounded number of labels."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.client import EngineState, EngineStatus
from octavo.engine.metrics import EngineMetrics
from octavo.errors import EngineDeadError, NumericalError, OverloadedError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams
from octavo.server.observability.exposition import export
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import ScriptedApp, scripted_app
from tests.support.server import RunningServer

# What boards and autoscalers made for vLLM ask for.
EXPECTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
}
# By the engine's own names.
HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_s",
    "inter_token_latency_seconds": "inter_token_s",
    "request_time_per_output_token_seconds": "time_per_output_token_s",
    "e2e_request_latency_seconds": "e2e_s",
    "request_queue_time_seconds": "queue_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "request_inference_time_seconds": "inference_s",
    "request_prompt_tokens": "prompt_tokens",
    "request_prefill_kv_computed_tokens": "computed_tokens",
    "request_num_preemptions": "preemptions",
    "request_generation_tokens": "generated_tokens",
    "request_max_num_generation_tokens": "longest_choice",
    "request_params_n": "params_n",
    "request_params_max_tokens": "params_max_tokens",
}
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "octavo.json"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


class ScriptedEngine(FakeClient):
    """A fake client whose own figures are scripted too."""

    numbers: EngineMetrics
    the_status: EngineStatus
    answer_delay_s = 0.0

    def status(self) -> EngineStatus:
        return self.the_status

    async def metrics(self) -> EngineMetrics:
        await asyncio.sleep(self.answer_delay_s)  # timed: scripted by the test
        if self.the_status.state is not EngineState.READY:
            raise OverloadedError("restarting", code="engine_restarting")
        return self.numbers


@pytest.fixture
def engine(smollm2_tokenizer: Tokenizer) -> ScriptedEngine:
    engine = ScriptedEngine(smollm2_tokenizer)
    engine.the_status = EngineStatus(EngineState.READY, pid=1)
    engine.numbers = engine_numbers(preemptions=3, steps=[1, 8, 8])
    return engine


def engine_numbers(*, preemptions: int, steps: list[int]) -> EngineMetrics:
    """steps: the tokens of each."""
    metrics = EngineMetrics(num_preemptions_total=preemptions, num_steps_total=len(steps))
    for num_tokens in steps:
        metrics.batched_tokens.observe(num_tokens)
    return metrics


def samples(metrics: ServerMetrics) -> dict[str, float]:
    """By name and labels beside model and engine, such as `vllm:request_success_total{stop}`."""
    found = {}
    for family in text_string_to_metric_families(export(metrics, "")[0].decode()):
        for sample in family.samples:
            others = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found[sample.name + (f"{{{','.join(others)}}}" if others else "")] = sample.value
    return found


def observe(
    tokenizer: Tokenizer, script: Script, num_outputs: int | None = None, params: SamplingParams | None = None
) -> ServerMetrics:
    """The metrics after one request, which is closed after so many outputs; None: at its end."""
    metrics = ServerMetrics()

    async def run() -> None:
        client = ObservedClient(FakeClient(tokenizer, script), metrics, "m")
        request = GenerationRequest(prompt=Prompt([1, 2, 3, 4, 5]), params=params or SamplingParams())
        stream = await client.generate(request)
        try:
            seen = 0
            while seen != num_outputs:
                await stream.__anext__()
                seen += 1
        except (StopAsyncIteration, EngineDeadError, NumericalError):
            pass
        await stream.aclose()
        await metrics.refresh()

    asyncio.run(run())
    return metrics


def test_a_finished_request_is_counted_once_everywhere(smollm2_tokenizer: Tokenizer) -> None:
    script = Script(["a", "b", "c"], num_cached_tokens=2, finish_reason="length")
    found = samples(observe(smollm2_tokenizer, script, params=SamplingParams(n=2, max_tokens=7)))
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 5
    assert found["vllm:prefix_cache_hits_total"] == 2
    assert found["vllm:generation_tokens_total"] == 6
    assert found["vllm:prompt_tokens_by_source_total{local_compute}"] == 3
    assert found["vllm:prompt_tokens_by_source_total{local_cache_hit}"] == 2
    assert found["vllm:prompt_tokens_by_source_total{external_kv_transfer}"] == 0
    assert found["vllm:request_success_total{length}"] == 2  # one a choice, as vLLM counts
    assert found["vllm:request_success_total{stop}"] == found["vllm:request_success_total{abort}"] == 0
    assert found["vllm:requests_cancelled_total{prefill}"] == found["vllm:requests_cancelled_total{decode}"] == 0


def test_tokens_of_kept_prompts_are_not_those_of_the_cache(
    engine: ScriptedEngine, smollm2_tokenizer: Tokenizer
) -> None:
    script = Script(["a"], num_cached_tokens=4, num_loaded_tokens=3)
    found = samples(observe(smollm2_tokenizer, script))
    assert found["vllm:prefix_cache_hits_total"] == 1
    assert found["vllm:prompt_tokens_cached_total"] == 4
    sources = {"local_compute": 1, "local_cache_hit": 1, "external_kv_transfer": 3}
    for source, count in sources.items():
        assert found[f"vllm:prompt_tokens_by_source_total{{{source}}}"] == count
    names = {
        "external_prefix_cache_queries": "num_store_queries_total",
        "external_prefix_cache_hits": "num_store_hits_total",
        "prompt_store_read_bytes": "num_store_bytes_read_total",
        "prompt_store_written_bytes": "num_store_bytes_written_total",
        "prompt_store_dropped_records": "num_store_records_dropped_total",
    }
    for i, name in enumerate(names.values(), 1):
        setattr(engine.numbers, name, i)
    metrics = ServerMetrics()
    ObservedClient(engine, metrics, "m")
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    assert [found[f"vllm:{name}_total"] for name in names] == [1, 2, 3, 4, 5]


def test_times_and_sizes_are_those_of_the_engine(engine: ScriptedEngine) -> None:
    for i, histogram in enumerate(HISTOGRAMS.values(), 1):
        getattr(engine.numbers, histogram).observe(i, times=2)
    metrics = ServerMetrics()
    ObservedClient(engine, metrics, "m")
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    for i, name in enumerate(HISTOGRAMS, 1):
        assert (found[f"vllm:{name}_count"], found[f"vllm:{name}_sum"]) == (2, 2 * i), name
    older = "time_per_output_token_seconds"  # the older name
    assert found[f"vllm:{older}_sum"] == found["vllm:inter_token_latency_seconds_sum"]


@pytest.mark.parametrize(("num_outputs", "phase"), [(0, "prefill"), (1, "decode")])
def test_a_cancelled_request_says_how_far_it_came(smollm2_tokenizer: Tokenizer, num_outputs: int, phase: str) -> None:
    found = samples(observe(smollm2_tokenizer, Script(["a", "b", "c"]), num_outputs))
    assert found[f"vllm:requests_cancelled_total{{{phase}}}"] == 1
    assert found["vllm:request_success_total{abort}"] == 1
    assert found["vllm:request_success_total{stop}"] == 0
    assert found["vllm:generation_tokens_total"] == num_outputs


@pytest.mark.parametrize(("error", "num_corrupted"), [(EngineDeadError("gone"), 0), (NumericalError("NaN"), 1)])
def test_an_engine_error_ends_a_request_once(
    smollm2_tokenizer: Tokenizer, error: Exception, num_corrupted: int
) -> None:
    found = samples(observe(smollm2_tokenizer, Script(["a"], error=error)))
    assert found["vllm:request_success_total{error}"] == 1
    assert found["vllm:request_success_total{abort}"] == 0
    assert found["vllm:corrupted_requests_total"] == num_corrupted


def test_a_request_that_the_engine_refuses_has_never_run(smollm2_tokenizer: Tokenizer) -> None:
    metrics = ServerMetrics()
    client = ObservedClient(FakeClient(smollm2_tokenizer, Script(refusal=UsageError("no"))), metrics, "m")
    with pytest.raises(UsageError):
        asyncio.run(client.generate(GenerationRequest(prompt=Prompt([1]), params=SamplingParams())))
    assert not any(value for name, value in samples(metrics).items() if "request_success" in name)


def test_counters_never_fall_when_an_engine_is_restarted(engine: ScriptedEngine) -> None:
    metrics = ServerMetrics()
    ObservedClient(engine, metrics, "m")
    asyncio.run(metrics.refresh())
    engine.the_status = replace(engine.the_status, pid=2, num_restarts=1)
    engine.numbers = engine_numbers(preemptions=4, steps=[8, 9])  # more than before: only the process tells
    asyncio.run(metrics.refresh())
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    assert found["vllm:num_preemptions_total"] == 7
    assert found["vllm:engine_restarts_total"] == 1
    assert found["vllm:iteration_tokens_total_count"] == 5
    assert found["vllm:iteration_tokens_total_sum"] == 34
    assert found["vllm:iteration_tokens_total_bucket{8.0}"] == 4
    ObservedClient(engine, metrics, "m")  # unloaded and loaded again: its client begins at 0
    engine.the_status = replace(engine.the_status, pid=3, num_restarts=0)
    asyncio.run(metrics.refresh())
    assert samples(metrics)["vllm:engine_restarts_total"] == 1
    assert samples(metrics)["vllm:num_preemptions_total"] == 11


def test_drafts_are_counted_by_place_and_by_source(engine: ScriptedEngine) -> None:
    metrics = ServerMetrics()
    ObservedClient(engine, metrics, "m")
    engine.numbers = replace(
        engine.numbers,
        num_drafts_total=5,
        num_draft_tokens_total={"ngram": 9, "prediction": 6},
        num_accepted_draft_tokens_total={"ngram": 4, "prediction": 3},
        num_accepted_by_position_total={"0": 4, "1": 3},
    )
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 5
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 15
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 7
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total{0}"] == 4
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total{1}"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_by_source_total{prediction}"] == 6
    assert found["vllm:spec_decode_num_accepted_tokens_by_source_total{ngram}"] == 4


@pytest.mark.parametrize("drafter", ["draft_model", "mtp", "eagle3", "assistant"])
def test_a_gauge_says_which_sources_of_drafts_are_in_use_or_why_none_is(engine: ScriptedEngine, drafter: str) -> None:
    metrics = ServerMetrics()
    engine.draft_info = {"draft_sources": ("ngram", drafter)}
    ObservedClient(engine, metrics, "m")
    for num_lost in (0, 1):
        engine.numbers = replace(engine.numbers, num_lost_draft_models=num_lost)
        asyncio.run(metrics.refresh())
        found = samples(metrics)
        assert found["vllm:spec_decode_source_enabled{ngram}"] == 1
        assert found[f"vllm:spec_decode_source_enabled{{{drafter}}}"] == 1 - num_lost
        assert not [name for name in found if "spec_decode_off" in name]
    engine.draft_info, metrics = {"no_drafts": "speculation is off"}, ServerMetrics()
    ObservedClient(engine, metrics, "m")
    asyncio.run(metrics.refresh())
    assert samples(metrics)["vllm:spec_decode_off_info{speculation is off}"] == 1


def test_gauges_are_those_of_now(engine: ScriptedEngine) -> None:
    metrics = ServerMetrics()
    client = ObservedClient(engine, metrics, "m")
    state = {"num_running": 2, "num_waiting": 5, "num_used_blocks": 16, "num_blocks": 64}
    engine.numbers = replace(engine.numbers, **state)
    engine.the_status = EngineStatus(EngineState.READY, metrics=engine.numbers)
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 5
    assert found["vllm:num_requests_waiting_by_reason{capacity}"] == 5
    assert found["vllm:num_requests_waiting_by_reason{deferred}"] == 0
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["vllm:engine_state{ready}"] == 1
    engine.the_status = EngineStatus(EngineState.RESTARTING, num_restarts=1)
    asyncio.run(metrics.refresh())
    found = samples(metrics)
    assert (found["vllm:engine_state{ready}"], found["vllm:engine_state{restarting}"]) == (0, 1)
    assert found["vllm:num_preemptions_total"] == 3  # what it last said
    asyncio.run(client.close())
    assert "vllm:num_requests_running" not in samples(metrics)
    assert samples(metrics)["vllm:num_preemptions_total"] == 3


def test_texts_to_embed_run_and_wait_too(smollm2_tokenizer: Tokenizer) -> None:
    engine = FakeClient(smollm2_tokenizer)
    engine.figures = EngineMetrics(num_waiting=2, num_embedding=16, num_embedding_waiting=4)
    with scripted_app(engine, smollm2_tokenizer) as app:
        assert httpx.get(app.url + "/metrics").status_code == 200
        found = samples(app.metrics)
        model = httpx.get(app.url + "/dashboard/data").json()["models"][0]
    assert found["vllm:num_requests_running"] == model["num_running"] == 16
    assert found["vllm:num_requests_waiting"] == model["num_waiting"] == 6
    assert found["vllm:num_requests_waiting_by_reason{capacity}"] == 6


def test_a_busy_engine_does_not_hold_a_scrape_up(engine: ScriptedEngine) -> None:
    metrics = ServerMetrics()
    ObservedClient(engine, metrics, "m")
    engine.answer_delay_s = 30
    begin = time.perf_counter()
    asyncio.run(metrics.refresh())
    assert time.perf_counter() - begin < 2
    assert samples(metrics)["vllm:engine_state{ready}"] == 1


def test_labels_of_http_requests_are_bounded() -> None:
    metrics = ServerMetrics()
    for i in range(10_000):
        metrics.http_request("/v1/models", f"FOO-{i}", 405, "method_not_supported")
        metrics.http_request(None, "GET", 404)
    assert len(metrics.http) == 2
    assert metrics.http["/v1/models", "other", 405] == 10_000


def test_rejections_are_counted_by_their_code() -> None:
    metrics = ServerMetrics()
    metrics.http_request("/v1/chat/completions", "POST", 503, "server_overloaded")
    metrics.http_request("/v1/chat/completions", "POST", 400, "integer_above_max_value")
    metrics.http_request("/v1/chat/completions", "POST", 500, "internal_error")
    metrics.http_request("/v1/models", "GET", 404, "model_not_found")
    assert metrics.rejected == {"server_overloaded": 1, "invalid_request": 1, "other": 1}


@pytest.mark.parametrize("prefix", ["", "a b", "1a", 'a"', "a:b"])
def test_a_wrong_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="metrics_prefix is"):
        ServerMetrics(prefix)


@pytest.fixture(scope="module")
def app(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedApp]:
    client = FakeClient(smollm2_tokenizer, Script(["a", "b", "c"]))
    with scripted_app(client, smollm2_tokenizer) as running:
        yield running


def test_both_formats_by_accept(app: ScriptedApp) -> None:
    assert httpx.post(app.url + "/v1/chat/completions", json=CHAT).status_code == 200
    plain = httpx.get(app.url + "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = {family.name: family.type for family in text_string_to_metric_families(plain.text)}
    assert EXPECTED.items() <= types.items()
    assert types["process_resident_memory_bytes"] == "gauge"
    # As Prometheus 2 and 3 ask; the colon of the names must survive.
    for accept in ("application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5", "application/openmetrics-text"):
        modern = httpx.get(app.url + "/metrics", headers={"Accept": accept})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in openmetrics.text_string_to_metric_families(modern.text)}
        assert names >= EXPECTED.keys()


def test_unknown_methods_and_paths_do_not_make_the_answer_longer(app: ScriptedApp) -> None:
    with httpx.Client(base_url=app.url) as client:
        for i in range(20):
            client.request(f"FOO-{i}", "/v1/models")
            client.get(f"/v1/nothing-{i}")
        before = len(client.get("/metrics").text.splitlines())
        for i in range(20, 40):
            client.request(f"FOO-{i}", "/v1/models")
            client.get(f"/v1/nothing-{i}")
        text = client.get("/metrics").text
    assert len(text.splitlines()) == before
    assert "FOO" not in text
    assert "nothing" not in text


def test_every_metric_of_the_dashboard_is_exported(app: ScriptedApp) -> None:
    exported = set()
    text = httpx.get(app.url + "/metrics").text
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
        exported |= {family.name + suffix for suffix in suffixes[family.type]}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    used = {name for query in queries for name in re.findall(r"(?:vllm:|process_)\w+", query)}
    assert len(used) > 20
    assert used <= exported


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["templating"]["list"][0]["type"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")


def test_scraping_is_cheap(app: ScriptedApp) -> None:
    with httpx.Client(base_url=app.url) as client:
        seconds = []
        for _ in range(10):
            begin = time.perf_counter()
            client.get("/metrics")
            seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1


def test_a_real_server(server: RunningServer) -> None:
    with server.client as client:
        before = client.get("/metrics").text
        answer = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).json()
        after = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def growth(name: str) -> float:
        return value(after, name) - value(before, name)

    assert growth("vllm:generation_tokens_total") == answer["usage"]["completion_tokens"]
    assert growth("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert growth("vllm:time_to_first_token_seconds_count") == 1
    assert growth("vllm:e2e_request_latency_seconds_count") == 1
    assert growth("vllm:inter_token_latency_seconds_count") == answer["usage"]["completion_tokens"] - 1
    assert growth("vllm:request_generation_tokens_sum") == answer["usage"]["completion_tokens"]
    assert growth("vllm:request_max_num_generation_tokens_sum") == answer["usage"]["completion_tokens"]
    computed = answer["usage"]["prompt_tokens"] - growth("vllm:prompt_tokens_cached_total")
    assert growth("vllm:request_prefill_kv_computed_tokens_sum") == computed
    assert growth("vllm:request_params_max_tokens_sum") == CHAT["max_tokens"]
    assert growth("vllm:iteration_tokens_total_count") >= answer["usage"]["completion_tokens"]
    assert growth('vllm:http_requests_total{method="POST",route="/v1/chat/completions",status="200"}') == 1
    assert value(after, "vllm:engine_resident_memory_bytes") > 50e6
    configuration = r'^vllm:cache_config_info\{.*block_size="\d+".*cache_dtype="float16".*\} 1.0$'
    assert re.search(configuration, after, re.MULTILINE)
