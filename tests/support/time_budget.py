"""A pytest plugin that fails tests that take too long, and a run whose total does.

pytest -p tests.support.time_budget --test-budget 20 --total-budget 1200

Times are processor seconds of the process and its finished children, because a busy machine makes a test slower but
does not add processor time. The time of a fixture counts for the first test that uses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

PROPERTY = "processor_s"
NUM_SHOWN = 20
EXIT_TOTAL = 6  # no exit status of pytest: the tests are right, and too many


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("time budget")
    group.addoption("--test-budget", type=float, required=True, help="processor seconds that one test may take")
    group.addoption("--total-budget", type=float, required=True, help="processor seconds of all tests together")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Budget(config), "time_budget_of_the_run")


class _Budget:
    """Measures and fails tests in a worker of xdist; the process that collects the reports judges the total."""

    def __init__(self, config: pytest.Config) -> None:
        self._of_test = config.getoption("--test-budget")
        self._total = config.getoption("--total-budget")
        self._is_worker = hasattr(config, "workerinput")
        self._start = 0.0
        self._taken: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            seconds = processor_seconds() - self._start
            report.user_properties.append((PROPERTY, seconds))
            if report.passed and seconds > self._of_test:
                report.outcome = "failed"
                report.longrepr = (
                    f"{report.nodeid} took {seconds:.1f} processor seconds; its budget is {self._of_test:g}: "
                    "make it smaller, or mark it slow"
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._taken[report.nodeid] = dict(report.user_properties)[PROPERTY]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._is_worker and sum(self._taken.values()) > self._total:
            session.exitstatus = EXIT_TOTAL

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self._taken.values())
        terminalreporter.section(f"{total:.0f} processor seconds; the slowest tests")
        for test, seconds in sorted(self._taken.items(), key=lambda item: -item[1])[:NUM_SHOWN]:
            terminalreporter.write_line(f"{seconds:7.1f}  {test}")
        if total > self._total:
            terminalreporter.write_line(f"the budget of all tests is {self._total:g} processor seconds")
