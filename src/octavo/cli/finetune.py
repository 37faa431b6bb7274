"""`octavo finetune`: train a LoRA adapter from examples."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.completion import complete_model
from octavo.cli.terminal import check_folder, find_model, write, write_json
from octavo.engine.loading.progress_bar import ProgressBar, size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.finetune.finetune import Finetuned, Finetuning
    from octavo.finetune.training_run import RunProgress

_KEEP_EVERY_S = 60.0
_RECENT = 20  # steps whose mean loss is shown
_STOPPED = 130


@click.command()
@click.argument("model", shell_complete=complete_model, metavar="MODEL")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="JSON lines: messages; prompt and completion; or text",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="ADAPTER",
    help="folder for the adapter [default: the data file's name plus -lora]",
)
@click.option(
    "--rank", type=click.IntRange(1, 1024), default=16, show_default=True, help="rank of the adapter's matrices"
)
@click.option("--alpha", type=click.FloatRange(0, min_open=True), help="scale times rank  [default: twice the rank]")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    default=2e-4,
    show_default=True,
    help="peak learning rate",
)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="passes over the data")
@click.option("--batch-tokens", type=click.IntRange(1), default=1024, show_default=True, help="tokens per step")
@click.option(
    "--sequence-length", type=click.IntRange(2), default=1024, show_default=True, help="maximum tokens per example"
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 0.9),
    default=0.05,
    show_default=True,
    help="share of the lines held out to measure the loss on",
)
@click.option(
    "--held-out-every",
    type=click.IntRange(1),
    metavar="STEPS",
    help="steps between measurements of that loss [default: ten times per run]",
)
@click.option(
    "--target-modules",
    default="all-linear",
    show_default=True,
    help="modules to train, such as q_proj,v_proj",
)
@click.option(
    "--frozen",
    type=click.Choice(["auto", "kept", "stored"]),
    default="auto",
    show_default=True,
    help="how to hold frozen weights: as floats in memory, or dequantized whenever they are needed",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="seed for the order of examples and the initial values",
)
@click.option("--restart", is_flag=True, help="discard an unfinished run and start over")
@click.option("--force", is_flag=True, help="replace ADAPTER if it exists")
@click.option("--json", "as_json", is_flag=True, help="write the report as JSON")
def finetune(model: str, data: Path, output: Path | None, **options: Any) -> None:
    """Train a LoRA adapter for MODEL on the answers in FILE.

    The loss covers only answers: the assistant's messages, completions, or all of a text. Training runs on the CPU. The
    weights of MODEL are not changed, and GGUF files of any type work. ADAPTER is a folder in PEFT's format. An
    interrupted run resumes with the same command; its state is in ADAPTER.partial. Needs torch: pip install
    'octavo[train]'.
    """
    from octavo.finetune.finetune import FinetuneOptions, open_finetuning, run_folder
    from octavo.finetune.finetune import finetune as train
    from octavo.finetune.training_run import Watcher
    from octavo.loader.checkpoint import open_checkpoint

    adapter = output or Path(f"{data.stem}-lora")
    _check_adapter(adapter, options.pop("force"))
    restart, as_json = options.pop("restart"), options.pop("as_json")
    options["target_modules"] = tuple(name.strip() for name in options["target_modules"].split(","))
    options["held_out_every"] = options["held_out_every"] or 0
    path, _ = find_model(model, {})
    start = time.monotonic()
    with (
        closing(open_checkpoint(path)) as checkpoint,
        run_folder(adapter, restart=restart) as folder,
        ProgressBar(announced=True) as bar,
        _stop_signals() as is_stopped,
    ):
        work = open_finetuning(model, checkpoint, data, FinetuneOptions(**options))
        shown = _Shown(work, bar)
        shown.say_data()
        watcher = Watcher(shown.step, shown.held_out, _every(_KEEP_EVERY_S), is_stopped)
        done = train(work, folder, shown.begin, watcher)
    _report(adapter, work, done, time.monotonic() - start, as_json)


def _check_adapter(adapter: Path, may_replace: bool) -> None:
    from octavo.adapters.peft import CONFIG_NAME

    check_folder(adapter)
    if not adapter.exists():
        return
    if not (adapter / CONFIG_NAME).is_file():
        raise UsageError(f"{adapter}: exists and is not an adapter; choose another name", param="output")
    if not may_replace:
        raise UsageError(f"{adapter}: already exists; --force replaces it", param="output")


class _Shown:
    """Shows the progress of a run on standard error."""

    def __init__(self, work: Finetuning, bar: ProgressBar) -> None:
        self._work, self._bar = work, bar
        self._total = work.plan.num_tokens(0, len(work.plan.steps))
        self._before, self._start = 0, time.monotonic()

    def say_data(self) -> None:
        examples, plan = self._work.examples, self._work.plan
        learned = sum(text.num_learned for text in plan.texts)
        _say(
            f"{examples.num_lines:,} lines: {len(plan.texts):,} examples with {learned:,} trained tokens,  "
            f"{len(plan.held_out):,} held out; {len(plan.steps):,} steps, {self._total:,} tokens in total"
        )
        if examples.num_cut or examples.num_dropped:
            _say(
                f"{examples.num_cut:,} examples are longer than --sequence-length and were cut; "
                f"{examples.num_dropped:,} have no answer before the cut and were dropped"
            )

    def begin(self, memory: str, steps: int) -> None:
        _say(memory)
        if steps:
            _say(f"resuming after {steps:,} of {len(self._work.plan.steps):,} steps")
        self._before, self._start = self._work.plan.num_tokens(0, steps), time.monotonic()
        self._bar.update("training", self._before, self._total)

    def step(self, progress: RunProgress) -> None:
        done = self._work.plan.num_tokens(0, progress.steps)
        recent = progress.losses[-_RECENT:]
        rate = (done - self._before) / max(time.monotonic() - self._start, 1e-9)
        note = f"loss {sum(recent) / len(recent):.3f}, {rate:,.0f} tokens/s"
        self._bar.update("training", done, self._total, note)

    def held_out(self, steps: int, loss: float) -> None:
        _say(f"held-out loss {loss:.4f} after {steps:,} of {len(self._work.plan.steps):,} steps")


def _say(text: str) -> None:
    click.echo(f"octavo: {text}", err=True)


def _every(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True at most once every `seconds` seconds."""
    last = time.monotonic()

    def is_due() -> bool:
        nonlocal last
        if time.monotonic() - last < seconds:
            return False
        last = time.monotonic()
        return True

    return is_due


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once SIGINT or SIGTERM has arrived. A second signal ends the process as
    usual.
    """
    came = False

    def stop(number: int, _frame: object) -> None:
        nonlocal came
        came = True
        signal.signal(number, before[signal.Signals(number)])
        _say("stopping after this step")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(adapter: Path, work: Finetuning, done: Finetuned, seconds: float, as_json: bool) -> None:
    steps, losses, held_out = done.progress.steps, done.progress.losses, done.progress.held_out
    if not done.nbytes:
        _say(f"stopped after {steps:,} of {len(work.plan.steps):,} steps; run the same command again to resume")
        raise SystemExit(_STOPPED)
    recent = losses[-_RECENT:]
    last = sum(recent) / len(recent)
    if as_json:
        looks = [{"step": step, "loss": loss} for step, loss in sorted(held_out.items())]
        report = {"adapter": str(adapter), "bytes": done.nbytes, "steps": steps, "tokens": done.num_tokens}
        write_json({**report, "seconds": round(seconds, 3), "losses": losses, "held_out": looks})
        return
    judged = f", held-out {held_out[min(held_out)]:.4f} -> {held_out[max(held_out)]:.4f}" if held_out else ""
    write(
        f"{adapter}: {size(done.nbytes)}, {len(work.modules)} modules of rank {work.options.rank}; {steps:,} steps; "
        f"loss {losses[0]:.4f} -> {last:.4f}{judged}\n"
    )
