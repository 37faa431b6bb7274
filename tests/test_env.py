"""The environment variables: defaults, values, and refusals that name the variable."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import env
from octavo.errors import UsageError
from tests.support.processes import octavo_here

NAMES = ("OCTAVO_CACHE", "OCTAVO_OFFLINE", "OCTAVO_ISA", "OCTAVO_NUM_THREADS", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "octavo"
    assert not env.is_offline()
    assert env.max_instruction_set() is None
    assert env.num_threads() == 0


@pytest.mark.parametrize(
    ("name", "value", "read", "expected"),
    [
        ("OCTAVO_CACHE", "/somewhere", env.cache_dir, Path("/somewhere")),
        ("XDG_CACHE_HOME", "/xdg", env.cache_dir, Path("/xdg/octavo")),
        ("OCTAVO_OFFLINE", "1", env.is_offline, True),
        ("OCTAVO_OFFLINE", "0", env.is_offline, False),
        ("OCTAVO_OFFLINE", "", env.is_offline, False),
        ("HF_HUB_OFFLINE", "true", env.is_offline, True),
        ("OCTAVO_ISA", "avx2", env.max_instruction_set, "avx2"),
        ("OCTAVO_ISA", "AMX", env.max_instruction_set, "amx"),
        ("OCTAVO_ISA", "i8mm", env.max_instruction_set, "i8mm"),
        ("OCTAVO_ISA", "", env.max_instruction_set, None),
        ("OCTAVO_NUM_THREADS", "7", env.num_threads, 7),
    ],
)
def test_values(
    name: str, value: str, read: Callable[[], object], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert read() == expected


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("OCTAVO_OFFLINE", "maybe", env.is_offline),
        ("OCTAVO_ISA", "sse", env.max_instruction_set),
        ("OCTAVO_NUM_THREADS", "0", env.num_threads),
        ("OCTAVO_NUM_THREADS", "-1", env.num_threads),
        ("OCTAVO_NUM_THREADS", "two", env.num_threads),
        ("OCTAVO_NUM_THREADS", "²", env.num_threads),
        ("OCTAVO_NUM_THREADS", "99999", env.num_threads),
    ],
)
def test_bad_values(name: str, value: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"{name} is '{re.escape(value)}'; it must be"):
        read()


def test_children_inherit_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/somewhere")
    child = env.subprocess_environment(TMPDIR="/tmp/x")
    assert (child["OCTAVO_CACHE"], child["TMPDIR"]) == ("/somewhere", "/tmp/x")


def test_every_variable_is_documented() -> None:
    assert env.__doc__ is not None
    documented = set(re.findall(r"^\| `(OCTAVO_\w+)`", env.__doc__, re.MULTILINE))
    used = set(re.findall(r'"(OCTAVO_\w+)"', Path(env.__file__).read_text()))
    assert documented == used
    assert len(used) < 10


LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}
TORCH = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        (LWS, {"nnodes": 2, "node_rank": 1, "master": "lws-0.lws.default:29500"}),
        (TORCH, {"nnodes": 4, "node_rank": 3, "master": "10.0.0.1:1234"}),
        (TORCH | {"MASTER_ADDR": "fd00::1"}, {"nnodes": 4, "node_rank": 3, "master": "[fd00::1]:1234"}),
        (SLURM, {"nnodes": 2, "node_rank": 0}),
        (SLURM | {"MASTER_ADDR": "n1"}, {"nnodes": 2, "node_rank": 0, "master": "n1:29500"}),
        (LWS | SLURM, {"nnodes": 2, "node_rank": 1, "master": "lws-0.lws.default:29500"}),
        ({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, {}),
    ],
)
def test_places_that_launchers_set(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: dict[str, object]
) -> None:
    for name in {*LWS, *TORCH, *SLURM}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OCTAVO_CLUSTER_TOKEN", raising=False)
    assert env.cluster_of_launcher() == {}  # a job of several machines may run an engine on each
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", "x" * 16)
    assert env.cluster_of_launcher() == expected


@pytest.mark.parametrize("value", [None, "x", "-1"])
def test_places_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", "x" * 16)
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.delenv("LWS_WORKER_INDEX", raising=False)
    if value is not None:
        monkeypatch.setenv("LWS_WORKER_INDEX", value)
    with pytest.raises(UsageError, match=r"LWS_WORKER_INDEX is .* it must be a number"):
        env.cluster_of_launcher()


def test_the_home_of_an_unknown_user_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert env.user_path("~/x") == Path("/home/me/x")
    assert env.user_path("~nobody-has-this-name/x") == Path("~nobody-has-this-name/x")
    monkeypatch.setenv("OCTAVO_CACHE", "~nobody-has-this-name/x")
    assert env.cache_dir() == Path("~nobody-has-this-name/x")


@pytest.mark.parametrize("command", [("show",), ("run", "hi", "-m"), ("plan",), ("batch", "in", "out", "-m")])
def test_a_model_below_such_a_home_is_an_error_that_names_it(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    arguments = [str(tmp_path / word) if word in ("in", "out") else word for word in command]
    result = octavo_here(*arguments, "~nobody-has-this-name/x.gguf")
    assert result.returncode in (2, 3), result.stderr
    assert "~nobody-has-this-name/x.gguf: no such file" in result.stderr
