"""The available memory of the machine, and of containers of both kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.backends.memory import MemoryBudget, host_memory

GIB = 2**30


def machine(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 100 kB\nMemAvailable: 8388608 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    cgroups.mkdir()
    return proc, cgroups


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    assert host_memory(proc, cgroups).available_bytes == 8 * GIB
    write(cgroups, memory__max="max", memory__current=GIB)
    assert host_memory(proc, cgroups).available_bytes == 8 * GIB


def test_the_tightest_of_the_enclosing_groups_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/pod/container\n")
    write(cgroups / "pod" / "container", memory__max=6 * GIB, memory__current=GIB)
    assert host_memory(proc, cgroups).available_bytes == 5 * GIB
    write(cgroups / "pod", memory__max=4 * GIB, memory__current=2 * GIB)
    assert host_memory(proc, cgroups).available_bytes == 2 * GIB


def test_file_cache_of_the_group_is_available(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    write(
        cgroups,
        memory__max=4 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4 * 3}",
    )
    assert host_memory(proc, cgroups).available_bytes == 2 * GIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    write(cgroups / "memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert host_memory(proc, cgroups).available_bytes == GIB
    write(cgroups / "memory", memory__limit_in_bytes=2**63 - 4096)
    assert host_memory(proc, cgroups).available_bytes == 8 * GIB


def test_a_group_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    write(cgroups, memory__max=GIB, memory__current=2 * GIB)
    assert host_memory(proc, cgroups).available_bytes == 0


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/../../..\n"])
def test_strange_group_files_do_no_harm(tmp_path: Path, text: str) -> None:
    proc, cgroups = machine(tmp_path, text)
    assert host_memory(proc, cgroups).available_bytes == 8 * GIB


def test_a_limit_on_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    (proc / "self" / "statm").write_text("1024 0 0 0 0 0 0\n")
    monkeypatch.setattr("resource.getrlimit", lambda _: (GIB, GIB))
    assert host_memory(proc, cgroups).available_bytes == GIB - 1024 * os.sysconf("SC_PAGE_SIZE")


def test_a_machine_without_proc(tmp_path: Path) -> None:
    assert 0 < host_memory(tmp_path / "proc", tmp_path).available_bytes <= 2**50


def test_this_machine() -> None:
    assert host_memory().available_bytes > 2**20


@pytest.mark.parametrize("usable", [0, 1, 10**6, 3 * 10**9, 10**10 + 7])
def test_the_least_memory_for_what_is_used(usable: int) -> None:
    least = MemoryBudget.with_usable(usable)
    assert MemoryBudget(least).usable_bytes >= usable
    assert MemoryBudget(least - 20).usable_bytes < max(usable, 1)
