"""`octavo ps` and `octavo stop`: list and stop this user's servers on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import click

from octavo.cli.terminal import is_terminal, write, write_json, write_table
from octavo.engine.loading.progress_bar import ProgressBar, duration
from octavo.errors import UsageError
from octavo.server.models.model_names import served_name
from octavo.server.registry import RunningServer, running_servers

_ASK_S = 2.0
_MAX_ANSWER_BYTES = 1 << 20
_POLL_S = 0.1
_STATE_COLOURS = {"ready": "green", "loading or ending": "yellow", "not answering": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def ps(*, as_json: bool) -> None:
    """List running servers: their models, state and requests."""
    servers = [_facts(server) for server in running_servers()]
    if as_json:
        write_json(servers)
    elif not servers:
        write("No server is running. `octavo serve MODEL` starts one.\n")
    else:
        write_table([_row(facts) for facts in servers], right=("REQUESTS", "UP"), colours=_STATE_COLOURS)


@click.command()
@click.argument("target", required=False, metavar="[PID | PORT | URL | MODEL]")
@click.option("--all", "every", is_flag=True, help="stop every server of this user")
@click.option("--now", is_flag=True, help="do not wait for running requests")
def stop(*, target: str | None, every: bool, now: bool) -> None:
    """Stop a server once its running requests have finished.

    Running requests may finish within the time set by `octavo serve --drain`. Without an argument, the command
    asks first, because another shell may have started the server.
    """
    chosen = _chosen(running_servers(), target, every)
    for server in chosen:
        for _ in range(1 + now):  # a second signal skips the wait
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)
            time.sleep(_POLL_S * now)
    with ProgressBar(announced=True) as progress:
        while alive := [server for server in chosen if server.is_alive]:
            progress.update("stopping", len(chosen) - len(alive), len(chosen))
            time.sleep(_POLL_S)
    for server in chosen:
        write(f"stopped {server.pid} ({', '.join(server.models)}) at {server.url}\n")


def _chosen(servers: list[RunningServer], target: str | None, every: bool) -> list[RunningServer]:
    if not servers:
        raise UsageError("you have no running server; `octavo serve MODEL` starts one")
    if every and target is not None:
        raise UsageError(f"give either --all or {target!r}, not both")
    if every:
        return servers
    listed = "; ".join(f"{server.pid} at {server.url} ({', '.join(server.models)})" for server in servers)
    if target is None:
        if len(servers) > 1:
            raise UsageError(f"{len(servers)} servers are running: name one or give --all: {listed}")
        if not is_terminal(sys.stdin):
            raise UsageError(f"say which server to stop, or give --all; running: {listed}")
        click.confirm(f"Stop {listed}?", abort=True, err=True)
        return servers
    words = {target.rstrip("/"), served_name(target)}
    named = [server for server in servers if words.intersection(_names(server))]
    if len(named) != 1:
        many = "no server" if not named else f"{len(named)} servers"
        raise UsageError(f"{target!r} matches {many} of yours; running: {listed}")
    return named


def _names(server: RunningServer) -> tuple[str, ...]:
    """Return the words that identify this server."""
    url = urlsplit(server.url)
    return (str(server.pid), str(url.port), url.netloc, server.url.rstrip("/"), *server.models)


def _facts(server: RunningServer) -> dict[str, Any]:
    """Return facts about a server. It may be loading or busy, or may require a key."""
    status, _ = _ask(f"{server.url}/health/ready")
    state = {200: "ready", 503: "loading or ending"}.get(status, "not answering")
    status, load = _ask(f"{server.url}/load")
    return {
        "pid": server.pid,
        "url": server.url,
        "models": list(server.models),
        "state": state,
        "requests": load.get("server_load") if status == 200 else None,
        "up_s": int(time.time() - server.began),
    }


def _row(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts as a row of the table that `ps` prints."""
    texts = {name.upper(): _text(value) for name, value in facts.items() if name != "up_s"}
    return {**texts, "UP": duration(facts["up_s"])}


def _ask(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON body of the response from this URL. The status is 0 if there is no response."""
    # The certificate may be self-signed, and nothing secret is sent.
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S, context=trusting) as answer:
            return answer.status, json.loads(answer.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        return error.code, {}
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {}


def _text(value: object) -> str:
    if value is None:
        return "?"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
