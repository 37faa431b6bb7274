"""The Kubernetes examples: options, paths and ports that exist, and a drain that has the time it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli.serve import serve
from octavo.config import EngineConfig
from octavo.loader.aliases import ALIASES
from octavo.loader.catalogue import find
from octavo.server.app import route_modules
from octavo.server.config import ServerConfig
from octavo.server.observability.exposition import export
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from tests.support.fake_client import FakeClient, read_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
FILES = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))}
DOCUMENTS = [document for documents in FILES.values() for document in documents]


def pod_specs(document: dict[str, Any]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The labels and the specification of each kind of pod in it."""
    spec = document["spec"]
    templates = [spec.get("template"), *(spec.get("leaderWorkerTemplate", {}).get(f"{w}Template") for w in WHO)]
    for template in templates:
        if template is not None:
            yield template["metadata"]["labels"], template["spec"]


WHO = ("leader", "worker")
PODS = [pod for document in DOCUMENTS for pod in pod_specs(document)]


def options_of(container: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `octavo serve`, as the command line reads them. Fails for one that it does not have."""
    program, command, *words = [*container["command"], *container.get("args", [])]
    assert (program, command) == ("octavo", "serve")
    context = serve.make_context("serve", words)
    return {name: value for name, value in context.params.items() if value not in (None, (), False)}


def seconds(text: str) -> float:
    return ServerConfig.from_options({"drain": text}).drain


def test_every_file_is_there() -> None:
    kinds = {document["kind"] for document in DOCUMENTS}
    assert kinds == {"Deployment", "Service", "LeaderWorkerSet", "InferencePool"}
    assert len(PODS) == 3


@pytest.mark.parametrize(("labels", "spec"), PODS, ids=[str(labels) for labels, _ in PODS])
def test_commands_and_times(labels: dict[str, str], spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    options = options_of(container)
    (model,) = options.pop("models")
    assert model in ALIASES or find(model) is not None
    engine = {name: value for name, value in options.items() if name in EngineConfig.__dataclass_fields__}
    EngineConfig(model=model, **engine)
    served = {name: value for name, value in options.items() if name not in engine}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    if labels.get("role") == "worker":
        assert not served
        return
    config = ServerConfig.from_options(served)
    assert Path(config.api_key_file or "").parent.as_posix() in mounts
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == config.port
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] >= pause + seconds(options["drain"]) + 10


def test_probes_ask_routes_that_need_no_key() -> None:
    paths = {route.path for module in route_modules() for route in module.router.routes}
    num_probes = 0
    for labels, spec in PODS:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = spec["containers"][0].get(kind)
            if probe is not None:
                assert probe["httpGet"]["path"] in paths & {"/health/ready", "/health/live"}
                assert probe["httpGet"]["port"] == "http"
                num_probes += 1
        scraped = labels.get("role") is None
        assert scraped <= ("/metrics" in paths)
    assert num_probes == 6


def test_services_and_pools_find_their_pods() -> None:
    for document in DOCUMENTS:
        spec = document["spec"]
        if document["kind"] == "Service":
            selector, ports = spec["selector"], {port["targetPort"] for port in spec["ports"]}
        elif document["kind"] == "InferencePool":
            selector, ports = spec["selector"]["matchLabels"], {port["number"] for port in spec["targetPorts"]}
        else:
            continue
        chosen = [pod for labels, pod in PODS if selector.items() <= labels.items()]
        assert chosen
        if document["kind"] == "Service":
            for pod in chosen:
                named = {port["name"] for port in pod["containers"][0].get("ports", ())}
                numbers = {port["containerPort"] for port in pod["containers"][0].get("ports", ())}
                assert ports <= named | numbers


def test_pickers_find_the_metrics_that_the_example_names(smollm2_path: Path) -> None:
    named = set(re.findall(r"vllm:\w+", (FOLDER / "inference_pool.yaml").read_text()))
    assert len(named) == 4
    metrics = ServerMetrics()
    ObservedClient(FakeClient(read_tokenizer(smollm2_path)), metrics, "model")
    metrics.refresh_statuses()
    text = export(metrics, "")[0].decode()
    for name in named:
        assert re.search(rf"^{name}{{.*}} [0-9.]+$", text, flags=re.MULTILINE), name
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="64"' in text
