"""Wheels: the script's arguments, the release workflow, and a wheel on an environment without a compiler."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from octavo.cli.serve import serve

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "build_wheels.sh"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
INSTALL_SECONDS = 20


def build_wheels(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PATH": path} if path else {})}
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=1800
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arch", "riscv64"], "--arch riscv64: x86_64 or aarch64"),
        (["--python", "3.9"], "--python 3.9: 3.10, 3.11 or 3.12"),
        (["--out"], "--out needs a value"),
        (["--fast"], "unknown argument --fast; --help lists them"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str) -> None:
    result = build_wheels(*arguments)
    assert result.returncode == 2
    assert complaint in result.stderr


def test_help_lists_every_argument() -> None:
    text = build_wheels("--help").stdout
    assert all(option in text for option in ("--arch", "--python", "--out", "--local", "--dry-run"))


def test_without_containers_the_systems_compiler_builds(tmp_path: Path) -> None:
    lines = build_wheels("--local", "--dry-run", "--python", "3.11 3.12", "--out", str(tmp_path)).stdout.splitlines()
    assert [re.findall(r"python3\.\d+", line) for line in lines[:2]] == [["python3.11"], ["python3.12"]]
    assert all("-static-libstdc++" in line for line in lines[:2])
    assert "auditwheel repair" in lines[2]
    assert str(tmp_path) in lines[2]


def test_another_processor_without_containers_is_cross_compiled(tmp_path: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the cross compiler is for x86-64")
    result = build_wheels("--local", "--dry-run", "--arch", "aarch64", "--python", "3.12", "--out", str(tmp_path))
    environment, tools, build, repair = result.stdout.splitlines()
    assert "python3.12 -m venv" in environment
    assert "pip install" in tools
    assert "_PYTHON_HOST_PLATFORM" not in tools  # or pip would install those of the other processor
    for part in ("_PYTHON_HOST_PLATFORM=linux-aarch64", "cmake/aarch64.cmake", "--no-build-isolation"):
        assert part in build
    assert "auditwheel repair" in repair


def test_with_a_container_engine_cibuildwheel_builds(tmp_path: Path) -> None:
    """The engine is a stand-in that answers `info`: this machine may have none."""
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\n")
    podman.chmod(0o755)
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    result = build_wheels("--dry-run", "--arch", "aarch64", path=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "CIBW_CONTAINER_ENGINE=podman" in result.stdout
    assert "CIBW_BUILD=cp310-* cp311-* cp312-*" in result.stdout
    assert "--archs aarch64" in result.stdout


def test_the_release_workflow_is_sound() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    jobs = workflow["jobs"]
    assert set(jobs["attach"]["needs"]) == set(jobs) - {"attach"}
    assert {entry["arch"] for entry in jobs["wheels"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    assert workflow["permissions"] == {"contents": "read"}
    # Wheels that nobody has run: they hold no release back, and their names in it say so.
    assert {entry["system"] for entry in jobs["experimental"]["strategy"]["matrix"]["include"]} == {
        "macos-arm64",
        "windows-x86_64",
    }
    assert jobs["experimental"]["continue-on-error"] is True
    assert "$wheel#experimental" in jobs["attach"]["steps"][-1]["run"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step) or "env" in step
            for script in re.findall(r"\btools/\S+", step.get("run", "")):
                assert (ROOT / script).exists()


def children_seconds() -> float:
    """Processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for this Python, built here."""
    pytest.importorskip("auditwheel")
    out = tmp_path_factory.mktemp("wheels")
    version = min(sys.version_info[:2], (3, 12))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = build_wheels("--local", "--python", ".".join(map(str, version)), "--out", str(out), path=path)
    assert result.returncode == 0, result.stdout + result.stderr
    [built] = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_tags_of_a_wheel_say_where_it_runs(wheel: Path) -> None:
    abi = "abi3" if sys.version_info >= (3, 12) else f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.search(rf"-{abi}-manylinux_2_\d+_", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith("octavo/backends/cpu/_native") and name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.startswith("octavo.libs/")], "a library of this system is in the wheel"


@pytest.mark.slow
def test_a_wheel_needs_no_compiler_and_answers_at_once(wheel: Path, tmp_path: Path, smollm2_path: Path) -> None:
    """In an environment of its own, with no tools but Python's in PATH; pip's cache is warm from a first download.

    The seconds are those of the processor: other work on the machine does not count.
    """
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PATH")}
    environment["PATH"] = str(bin_folder)
    pip = [bin_folder / "pip", "install", "-q"]
    subprocess.run([*pip, "--target", tmp_path / "warm", wheel], check=True, env=environment)
    start = children_seconds()
    subprocess.run([*pip, wheel], check=True, env=environment)
    seconds = children_seconds() - start
    answer = subprocess.run(
        [bin_folder / "octavo", "run", "--seed", "1", smollm2_path, "Why is the sky blue?"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    assert "scatter" in answer.stdout
    assert seconds < INSTALL_SECONDS


def test_a_pull_request_runs_the_gate_on_both_architectures() -> None:
    workflow = yaml.safe_load(WORKFLOW.with_name("pull_request.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    gate = workflow["jobs"]["gate"]
    assert set(gate["strategy"]["matrix"]["runner"]) == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    assert [step["run"] for step in gate["steps"] if "run" in step] == [".ci/run gate"]


def test_the_container_serves_what_its_files_say() -> None:
    """Its context has all that a wheel is built from, and its arguments are those of `octavo serve`."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"CMakeLists.txt", "cmake", "csrc", "pyproject.toml", "src", "README.md", "LICENSE"} == kept
    assert all((ROOT / name).exists() for name in kept)
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["octavo"]
    assert entry[:2] == ["octavo", "serve"]
    values = [re.sub(r"\$\{(\w+)[^}]*\}", r"\1", word) for word in service["command"]]
    context = serve.make_context("serve", [*entry[2:], *values], resilient_parsing=False)
    assert (context.params["host"], context.params["models"]) == ("0.0.0.0", ("MODEL",))
    assert list(context.params["api_key"]) == ["OCTAVO_API_KEY"]
