"""The number of threads: affinity, cores and quotas, from files as the kernel writes them."""

import os

import pytest

from octavo.backends.cpu.threads import plan_threads
from octavo.errors import UsageError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cpus, cores, files): a made-up machine; returns the keyword arguments of plan_threads."""

    def make(cpus: int, siblings: int = 1, cgroup: str = "0::/\n", **files: str):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
        monkeypatch.delenv("OCTAVO_NUM_THREADS", raising=False)
        for cpu in range(cpus):
            folder = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True, exist_ok=True)
            first = cpu // siblings * siblings
            (folder / "thread_siblings_list").write_text(",".join(str(first + i) for i in range(siblings)) + "\n")
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        own = tmp_path / "self"
        own.write_text(cgroup)
        return {"cgroup": tmp_path / "cgroup", "topology": tmp_path / "cpus", "self_cgroup": own}

    return make


def test_one_thread_a_core(machine):
    plan = plan_threads(**machine(8, siblings=2))
    assert plan.count == 4
    assert plan.reasons == ("8 CPUs in the affinity mask", "4 physical cores")
    assert plan_threads(**machine(6)).count == 6


@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("400000 100000", 4), ("junk", 8)],
)
def test_quota_of_cgroup_v2(machine, quota, count):
    assert plan_threads(**machine(8, cpu_dot_max=quota)).count == count


def test_a_parent_group_limits_too(machine):
    arguments = machine(
        8, cgroup="0::/pod/container\n", pod__cpu_dot_max="300000 100000", pod__container__cpu_dot_max="max 100000"
    )
    plan = plan_threads(**arguments)
    assert plan.count == 3
    assert plan.reasons[-1] == "a control group quota of 3 CPUs"


def test_quota_of_cgroup_v1(machine):
    files = {"cpu,cpuacct__docker__x__cpu_dot_cfs_quota_us": "150000\n"}
    files["cpu,cpuacct__docker__x__cpu_dot_cfs_period_us"] = "100000\n"
    plan = plan_threads(**machine(8, cgroup="4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n", **files))
    assert plan.count == 1
    unlimited = {name: text.replace("150000", "-1") for name, text in files.items()}
    assert plan_threads(**machine(8, cgroup="4:cpu,cpuacct:/docker/x\n", **unlimited)).count == 8


def test_spinning_is_short_under_a_quota_and_absent_with_too_many_threads(machine):
    free = plan_threads(3, **machine(4)).spin_us
    fractional = plan_threads(**machine(4, cpu_dot_max="250000 100000")).spin_us
    assert all(a < b for a, b in zip(fractional, free, strict=True))
    assert plan_threads(9, **machine(4)).spin_us == (0, 0)


def test_what_the_user_asks_for_wins(machine, monkeypatch):
    arguments = machine(8, siblings=2)
    monkeypatch.setenv("OCTAVO_NUM_THREADS", "3")
    plan = plan_threads(**arguments)
    assert (plan.count, plan.reasons[-1]) == (3, "OCTAVO_NUM_THREADS=3")
    assert plan_threads(5, **arguments).count == 5
    monkeypatch.setenv("OCTAVO_NUM_THREADS", "many")
    with pytest.raises(UsageError, match="OCTAVO_NUM_THREADS is 'many'"):
        plan_threads(**arguments)


def test_nothing_readable_means_the_affinity_mask(tmp_path):
    nowhere = tmp_path / "nowhere"
    plan = plan_threads(cgroup=nowhere, topology=nowhere, self_cgroup=nowhere)
    assert plan.count >= 1
