"""The measurement on a GPU, at tiny sizes without one: every case runs, the record goes on, the page has targets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(300)
def test_every_case_runs_at_tiny_sizes_and_is_right(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    done = run("--smoke", "--json", record)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = json.loads(record.read_text())["cases"]
    groups = {"correctness", "ceilings", "models", "products", "providers", "kernels", "offload", "peers"}
    assert {case["group"] for case in cases.values()} == groups
    for name, case in cases.items():
        assert case["state"] == "done", name
        assert case["figures"], name
    values = [
        figure["value"] for case in cases.values() for figure in case["figures"] if figure["unit"] == "microseconds"
    ]
    assert min(values) > 0


def test_without_a_gpu_it_says_so(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    page = tmp_path / "page.md"
    assert script("gpu").main(["--json", str(tmp_path / "gpu.json"), "--page", str(page)]) == 1
    assert "finds no GPU" in capsys.readouterr().out
    assert "not yet run on a GPU" in page.read_text()


def test_cases_are_run_once_and_failed_ones_again_on_another_commit(script: Callable[[str], ModuleType]) -> None:
    gpu = script("gpu")
    here = gpu.commit()

    def is_wanted(known: dict[str, str] | None, only: str = "") -> bool:
        record = {"cases": {} if known is None else {"bf16: decode": known}}
        wanted: bool = gpu.is_wanted(SimpleNamespace(name="bf16: decode"), record, only)
        return wanted

    assert is_wanted(None)
    assert not is_wanted({"state": "done", "commit": "another"})
    assert not is_wanted({"state": "did not end", "commit": here})
    assert is_wanted({"state": "wrong result", "commit": "another"})
    assert is_wanted({"state": "done", "commit": here}, only="bf16")
    assert not is_wanted(None, only="fp8")


def test_a_wrong_result_has_no_figures_and_the_next_case_runs(script: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("torch")
    import torch

    gpu, cases = script("gpu"), script("gpu_cases")
    machine = cases.Machine(torch.device("cpu"), cases.TINY)

    def wrong(_: object) -> list[object]:
        cases.check("a product", torch.ones(3), torch.full((3,), 1.1), 1e-2)
        return []

    found = gpu.outcome(cases.Case("wrong", "kernels", wrong), machine)
    assert found["state"] == "wrong result"
    assert "a product: the relative error is 9.09e-02" in found["error"]
    assert "figures" not in found
    assert cases.check("nothing", torch.ones(3), torch.ones(3), 1e-2) == 0
    with pytest.raises(cases.WrongResultError):
        cases.check("not a number", torch.full((3,), float("nan")), torch.ones(3), 1e-2)


def test_targets_name_cases_and_are_met_or_not(script: Callable[[str], ModuleType]) -> None:
    report = script("gpu_report")
    figures = [
        {"name": "heads and cache, rows 32", "value": 3.0, "unit": "microseconds", "fraction": 0.2},
        {"name": "norm, rows 32", "value": 8.0, "unit": "microseconds", "fraction": 0.2},
        {"name": "gate, rows 8192", "value": 120.0, "unit": "microseconds", "fraction": 0.95},
    ]
    machine = {"device": "A GPU", "memory_gb": 80.0, "torch": "2", "triton": "3", "commit": "abc", "date": "2026-11-23"}
    cases = {
        "rows": {"state": "done", "group": "kernels", "commit": "abb", "figures": figures},
        "launches": {"state": "done", "group": "ceilings", "commit": "abc", "figures": figures[:1], "note": "Beware."},
        "states": {"state": "failed", "group": "kernels", "commit": "abc", "figures": [], "error": "OutOfMemoryError"},
    }
    page = report.page({"machine": machine, "cases": cases})
    limits = "at most 4 microseconds | at most 2.5 microseconds"
    assert f"| rotation and cache write, 32 rows | 3 microseconds | {limits} | must |" in page
    assert f"| norm, 32 rows | 8 microseconds | {limits} | no |" in page
    assert "| gate, 8,192 rows | 95% | 80% | 90% | aim |" in page
    assert "The farthest from its target: norm, 32 rows, at 50% of it." in page
    assert "- states: failed. OutOfMemoryError" in page
    assert "not yet run on a GPU" in page
    assert "### rows (abb)\n" in page, "figures of another commit say so"
    assert "### launches\n\nBeware.\n" in page
    assert "Libraries compared with our kernels: not yet run on a GPU." in page
    names = {"Q4_K, rows 8: triton": 40.0, "Q4_K, rows 8: humming": 25.0, "Q4_K, rows 16: triton": 41.0}
    figures = [{"name": n, "value": v, "unit": "microseconds", "fraction": None} for n, v in names.items()]
    figures.append(
        {"name": "Q4_K, rows 16: humming, not installed", "value": 0.0, "unit": "not here", "fraction": None}
    )
    cases["providers, Q4_K"] = {"state": "done", "group": "providers", "commit": "abc", "figures": figures}
    page = report.page({"machine": machine, "cases": cases})
    assert "| Q4_K, rows 8 | humming | triton 40, humming 25 microseconds |" in page
    assert "| Q4_K, rows 16 | triton | triton 41 microseconds |" in page


def test_each_target_that_is_not_met_has_the_limit_of_the_data_sheet(script: Callable[[str], ModuleType]) -> None:
    page = script("gpu_report").page(json.loads((ROOT / "docs" / "lab" / "performance_gpu.json").read_text()))
    rows = page.partition("## What the hardware allows")[2].partition("## Who wins where")[0]
    missed = [line.split(" | ")[0] for line in page.splitlines() if line.endswith(" | no |")]
    assert missed
    assert [line.split(" | ")[0] for line in rows.splitlines() if line.startswith("| ")][1:] == missed
    assert (
        "| 4 bits, a layer, 1 row | 53.5 microseconds | 23.8 microseconds | 218.1 million numbers of 4.19 bits" in rows
    )
    assert "| bf16, batch 256 | 11,723 tokens/s | 24,890 tokens/s | 15.0 GB of weights and 34.4 GB of cache" in rows


def test_the_page_is_that_of_the_record(script: Callable[[str], ModuleType]) -> None:
    docs = ROOT / "docs"
    record = json.loads((docs / "lab" / "performance_gpu.json").read_text())
    assert all(record["machine"][key] for key in ("device", "commit", "date", "command"))
    assert all(case["commit"] for case in record["cases"].values())
    assert (docs / "lab" / "performance_gpu.md").read_text() == script("gpu_report").page(record)
