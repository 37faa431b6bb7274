"""`octavo batch`: answer a file of requests, with its own engine or through a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.batches.lines import BatchLine, LineError, LineResult, with_seed
from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import DEFAULT_MODEL, Options, first_given, with_engine_options
from octavo.cli.terminal import find_model
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import ProgressBar, duration
from octavo.errors import OctavoError, UsageError

if TYPE_CHECKING:
    from octavo.batches.journal import Journal
    from octavo.batches.runner import Call, LineAnswer
    from octavo.server.models.served_model import ServedModel

_PATH = click.Path(path_type=Path)
_URL_WIDTH = 32
_HEALTH_S = 30.0  # time to wait for a server's first answer
_EXIT_FAILED = 6


class FailedLinesError(OctavoError):
    """Some lines of a batch have no answer."""

    exit_code = _EXIT_FAILED


@click.command("batch", cls=HeadedCommand)
@click.argument("source", type=_PATH, metavar="INPUT")
@click.argument("output", type=_PATH, metavar="OUTPUT")
@click.option(
    "-m", "--model", shell_complete=complete_model, help=f"path, hub id or short name [default: {DEFAULT_MODEL}]"
)
@click.option("--errors", type=_PATH, metavar="FILE", help="write failed lines to FILE [default: OUTPUT]")
@click.option("--ordered", is_flag=True, help="write answers in the order of the input")
@click.option("--retry-failed", is_flag=True, help="also retry lines that failed in an earlier run")
@click.option("--column", metavar="NAME", help="CSV or Parquet column that holds the prompts")
@click.option("--template", metavar="TEXT", help="prompt with column names in braces: 'Translate: {text}'")
@click.option("--system", metavar="TEXT", help="system message for every prompt from a column")
@click.option("--max-tokens", type=click.IntRange(min=1), help="maximum tokens per answer, for lines that set no limit")
@click.option("--url", metavar="SERVER", help="send requests to this server, such as http://localhost:8000")
@click.option(
    "--rows", type=click.IntRange(1, 4096), help=f"lines at once [default: all that fit; {_URL_WIDTH} with --url]"
)
@click.option("--ray", is_flag=True, help="run on a Ray cluster (RAY_ADDRESS), or on a local one")
@click.option("--ray-actors", type=click.IntRange(min=1), help="engines on that cluster [default: one per machine]")
@click.option("--ray-cpus", type=click.IntRange(min=1), help="CPUs per engine there [default: all of the machine's]")
@with_engine_options
def batch(*, source: Path, output: Path, engine_options: Options, **given: Any) -> None:
    """Answer all requests in a file. Run the same command again to resume.

    Each line of INPUT is a request: OpenAI's batch format, or an object with a prompt, messages or input. In a .csv,
    .tsv or .parquet file, each row is a prompt. OUTPUT receives results in OpenAI's batch format as they complete.

    Exit codes: 0 if every line was answered, 6 if some failed, 130 after Ctrl-C.
    """
    _run(source, output, engine_options, given)


@click.command("run-batch", cls=HeadedCommand, hidden=True)
@click.option("-i", "--input-file", "source", type=_PATH, required=True, metavar="INPUT", help="file of requests")
@click.option("-o", "--output-file", "output", type=_PATH, required=True, metavar="OUTPUT", help="file of answers")
@click.option("-m", "--model", shell_complete=complete_model, help="path, hub id or short name")
@with_engine_options
def run_batch(*, source: Path, output: Path, model: str | None, engine_options: Options) -> None:
    """Answer all requests in a file, with vLLM's options.

    See `octavo batch --help` for the formats.
    """
    _run(source, output, engine_options, {"model": model})


def _run(source: Path, output: Path, engine_options: Options, given: dict[str, Any]) -> None:
    from octavo.batches.journal import Journal

    _check(given, engine_options)
    if not source.is_file():
        raise UsageError(f"{source}: no such file; give a file of requests")
    job = _Job(source, given)
    options = {name: bool(given.get(name)) for name in ("retry_failed", "ordered")}
    with Journal(output, given.get("errors"), **options) as journal, ProgressBar(announced=True) as progress:
        job.scan(journal)
        if job.num_left:
            try:
                if given.get("ray"):
                    _answer_by_ray(job, journal, progress, engine_options)
                else:
                    asyncio.run(_answer(job, journal, progress, engine_options))
            except KeyboardInterrupt:
                click.echo(f"stopped; run the same command again for the remaining {job.num_left:,} lines", err=True)
                raise
    _report(job, journal, output if given.get("errors") is None else given["errors"])


def _check(given: dict[str, Any], engine_options: Options) -> None:
    """Raise UsageError for options that exclude each other."""
    if given.get("ray") and (other := next((name for name in ("url", "rows") if given.get(name)), None)):
        raise UsageError(f"--ray cannot be combined with --{other}; leave one out")
    if not given.get("ray") and (given.get("ray_actors") or given.get("ray_cpus")):
        raise UsageError("--ray-actors and --ray-cpus need --ray; add it, or leave them out")
    if given.get("url") and (unused := (given.get("model") and "--model") or first_given(engine_options)):
        raise UsageError(f"{unused} configures a local engine, but --url uses a running server; leave one out")
    if not given.get("url"):
        EngineConfig.resolve(given.get("model") or DEFAULT_MODEL, engine_options)


class _Job:
    """Lines to run, and progress so far."""

    def __init__(self, source: Path, given: dict[str, Any]) -> None:
        self.source, self.given = source, given
        self.num_lines = self.num_left = self.num_tokens = self.num_tokens_before = 0
        self.began = time.monotonic()

    def lines(self) -> Iterator[BatchLine | LineError]:
        from octavo.batches.lines import read_lines
        from octavo.batches.tables import read_table

        table = [self.given.get(name) for name in ("column", "template", "system")]
        if self.source.suffix.lower() in (".csv", ".tsv", ".parquet"):
            found: Iterator[BatchLine | LineError] = read_table(self.source, *table)
            yield from map(self._with_limit, found)
            return
        if any(table):
            raise UsageError(f"{self.source} has no columns; --column, --template and --system are for CSV or Parquet")
        with self.source.open("rb") as file:
            yield from map(self._with_limit, read_lines(file))

    def left(self, journal: Journal) -> Iterator[BatchLine | LineError]:
        return (line for line in self.lines() if not journal.has(line.custom_id))

    def scan(self, journal: Journal) -> None:
        """Count the lines before the model is loaded. Raises UsageError if two lines have the same id."""
        seen: dict[int, int] = {}
        numbers = []
        for line in self.lines():
            first = seen.setdefault(hash(line.custom_id), line.number)
            if first != line.number:
                raise UsageError(
                    f"{self.source}: lines {first} and {line.number} have the custom_id {line.custom_id!r:.80}; "
                    "each line needs a unique one"
                )
            self.num_lines += 1
            if not journal.has(line.custom_id):
                numbers.append(line.number)
        self.num_left = len(numbers)
        self.num_tokens_before = journal.usage["output_tokens"]
        journal.expect(numbers)

    def count(self, num_tokens: int) -> str:
        """Count a result and return the progress bar's note.

        num_tokens: total number of tokens so far
        """
        self.num_left -= 1
        self.num_tokens = num_tokens - self.num_tokens_before
        return f"{self.num_tokens / max(time.monotonic() - self.began, 1e-3):,.0f} tokens/s"

    def _with_limit(self, line: BatchLine | LineError) -> BatchLine | LineError:
        limit = self.given.get("max_tokens")
        if limit is None or isinstance(line, LineError) or line.url == "/v1/embeddings":
            return line
        name = "max_output_tokens" if line.url == "/v1/responses" else "max_tokens"
        if line.body.keys() & {"max_tokens", "max_completion_tokens", "max_output_tokens"}:
            return line
        return replace(line, body={**line.body, name: limit})


def _put_of(job: _Job, journal: Journal, progress: ProgressBar) -> Callable[[LineResult], None]:
    """Return a function that writes each result and shows progress."""

    def put(result: LineResult) -> None:
        journal.put(result)
        note = job.count(journal.usage["output_tokens"])
        num_failed = f", {journal.num_failed:,} failed" if journal.num_failed else ""
        progress.update(job.source.name, job.num_lines - job.num_left, job.num_lines, note + num_failed)

    return put


def _answer_by_ray(job: _Job, journal: Journal, progress: ProgressBar, engine_options: Options) -> None:
    from octavo.ray.batches import answer_lines

    answer_lines(
        job.left(journal),
        _put_of(job, journal, progress),
        job.given.get("model") or DEFAULT_MODEL,
        engine_options,
        num_actors=job.given.get("ray_actors"),
        num_cpus=job.given.get("ray_cpus"),
    )


async def _answer(job: _Job, journal: Journal, progress: ProgressBar, engine_options: Options) -> None:
    from octavo.batches.runner import BatchRunner

    put = _put_of(job, journal, progress)
    url = job.given.get("url")
    place = _server(url) if url else _engine(job.given.get("model") or DEFAULT_MODEL, engine_options)
    async with place as (call, width):
        progress.update(job.source.name, job.num_lines - job.num_left, job.num_lines)
        job.began = time.monotonic()
        wanted = job.given.get("rows")
        await BatchRunner(call, lambda: wanted or width(), put).run(job.left(journal))


@asynccontextmanager
async def _engine(model: str, options: Options) -> AsyncIterator[tuple[Call, Callable[[], int]]]:
    """Start an engine for this batch, and yield a function that answers a line.

    The lines go through the server's application. The second function returns the number of lines to run at once.
    """
    from octavo.server.line_engine import line_engine

    path, options = find_model(model, options)
    async with AsyncExitStack() as stack:
        with ProgressBar(in_bytes=True, transient=True) as progress:
            place = line_engine(model, EngineConfig(model=str(path), **options), _Loading(progress))
            answering = await stack.enter_async_context(place)
        yield answering


@asynccontextmanager
async def _server(url: str) -> AsyncIterator[tuple[Call, Callable[[], int]]]:
    """Connect to a running server, and yield a function that answers a line.

    The second function returns the number of lines to run at once.
    """
    import httpx

    from octavo import env
    from octavo.batches.runner import line_answer

    key = env.openai_api_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(None, connect=10.0))
    except (ValueError, httpx.InvalidURL) as error:
        raise UsageError(f"--url {url}: {error}") from None
    async with client:
        try:
            await client.get("/health", timeout=_HEALTH_S)  # if the server stops later, the batch waits for it
        except httpx.ReadTimeout:
            raise UsageError(
                f"--url {url}: the server accepted the connection but sent nothing for {_HEALTH_S:g} s; "
                "restart it, or give another address"
            ) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise UsageError(f"--url {url}: no server answers: {reason}; start it, or give another address") from None

        async def call(line: BatchLine) -> LineAnswer:
            try:
                found = await client.post(line.url, json=with_seed(line, line.custom_id))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConnectionError(f"{base}: {error or type(error).__name__}") from None
            return line_answer(found.status_code, found.headers, found.content)

        yield call, lambda: _URL_WIDTH


class _Loading:
    """Shows progress while a model loads. Implements `octavo.server.models.model_loader.LoadReport`."""

    def __init__(self, progress: ProgressBar) -> None:
        self._progress = progress

    def progress(self, what: str, done: int, total: int) -> None:
        self._progress.update(what, done, total)

    def phase(self, name: str, seconds: float) -> None:
        pass

    def ready(self, model: ServedModel) -> None:
        pass


def _report(job: _Job, journal: Journal, failures: Path) -> None:
    seconds = time.monotonic() - job.began
    text = f"{journal.num_completed:,} of {job.num_lines:,} lines answered"
    if job.num_tokens:
        text += f"; {job.num_tokens:,} tokens in {duration(seconds)}"
    click.echo(text, err=True)
    if journal.num_failed:
        raise FailedLinesError(
            f"{journal.num_failed:,} lines failed; see {failures} for the errors; add --retry-failed to run them again"
        )
