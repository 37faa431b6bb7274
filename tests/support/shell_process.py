"""Runs the listener of `shell_server` in a separate process: `python -m tests.support.shell_process {json options}`.

Writes its address to standard output, followed by one line per event.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from contextlib import suppress

from octavo.errors import OctavoError
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.http.access_log import set_up_logging
from octavo.server.http.listener import bind, serve
from tests.support.shell_server import Probe, endpoints
from tests.support.waiting import wait_until_async


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def run(config: ServerConfig) -> None:
    probe = Probe()
    app = build_app(config, [endpoints(probe)], lambda *_: None)
    sock = bind(config)
    say(json.dumps(sock.getsockname()[:2]))

    async def drain(_number: int) -> None:
        say("draining")
        with suppress(AssertionError):  # whatever still runs then is ended by `serve`
            await wait_until_async(lambda: probe.num_closed >= probe.num_started, seconds=config.drain)
        say("drained")

    await serve(app, config, sock, on_drain=drain)
    say(f"ended {probe.num_started} {probe.num_closed}")


def main() -> None:
    options = json.loads(sys.argv[1])
    if (num_files := options.pop("num_files", None)) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    set_up_logging(as_json=options.pop("log_json", False))
    try:
        asyncio.run(run(ServerConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})))
    except OctavoError as error:
        sys.stderr.write(f"octavo: {error}\n")
        sys.exit(error.exit_code)


main()
