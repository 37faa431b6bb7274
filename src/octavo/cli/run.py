"""`octavo run`: answer one prompt, streamed."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import (
    DEFAULT_MODEL,
    Options,
    sampling_params,
    with_engine_options,
    with_sampling_options,
)
from octavo.cli.terminal import is_terminal, load_model, parts_of, say_limit, write, write_json
from octavo.errors import ModelLoadError, UsageError
from octavo.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from octavo.generation_request import PromptInput
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

_ADAPTER = "lora"  # name of the --lora adapter
_DASHED_PROMPT = re.compile(r"-(?!-?[\w-]+=)(?:\s|\d|.*\s)", re.DOTALL)


class _RunCommand(HeadedCommand):
    """A command that treats a word with white space or a digit after its dash, such as `-5 + 3?`, as a prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        end = args.index("--") if "--" in args else len(args)
        is_prompt = [
            before not in with_value and _DASHED_PROMPT.match(word) is not None
            for before, word in zip(["", *args], args[:end], strict=False)
        ]
        options = [word for word, moves in zip(args, is_prompt, strict=False) if not moves]
        words = [word for word, moves in zip(args, is_prompt, strict=False) if moves] + args[end + 1 :]
        return super().parse_args(ctx, [*options, "--", *words] if words else options)


@click.command(cls=_RunCommand)
@click.argument("words", shell_complete=complete_model, nargs=-1, metavar="[MODEL] PROMPT")
@click.option("-m", "--model", shell_complete=complete_model, help="the model, instead of the MODEL argument")
@click.option("-p", "--prompt", metavar="TEXT", help="the prompt, instead of the PROMPT argument")
@click.option("--system", help="system message before the prompt")
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    metavar="FILE",
    help="text, image, PDF or video to put before the prompt; may be repeated",
)
@click.option("--schema", metavar="FILE", help="make the answer JSON that matches the JSON schema in this file")
@click.option("--closed-objects", is_flag=True, help="allow only the properties named by --schema")
@click.option("--grammar", metavar="TEXT", help="make the answer match this Lark or GBNF grammar")
@click.option("--regex", metavar="TEXT", help="make the answer match this regular expression")
@click.option("--choice", multiple=True, metavar="TEXT", help="allow this text as the answer; repeat for each choice")
@click.option(
    "--lora", metavar="PATH[:SCALE]", help="LoRA adapter: a PEFT folder or a GGUF file; SCALE multiplies its effect"
)
@click.option(
    "--prompt-cache", metavar="FILE", help="save the KV cache of the prompt to this file, and reuse it next time"
)
@click.option("--prompt-cache-all", is_flag=True, help="with --prompt-cache: save the answer too")
@click.option("--prompt-cache-ro", is_flag=True, help="with --prompt-cache: never write the file")
@click.option("--raw", is_flag=True, help="continue the prompt as it is, without the chat template")
@click.option("--verbose", is_flag=True, help="print counts, times and rates at the end, on standard error")
@click.option("--json", "as_json", is_flag=True, help="print text, token ids and timings as JSON at the end")
@with_engine_options
@with_sampling_options
def run(
    *,
    words: tuple[str, ...],
    model: str | None,
    prompt: str | None,
    system: str | None,
    files: tuple[str, ...],
    lora: str | None,
    raw: bool,
    verbose: bool,
    as_json: bool,
    engine_options: Options,
    sampling_options: Options,
    **constraint: Any,
) -> None:
    """Answer a prompt. The answer is printed as it is generated.

    MODEL is a path, a hub id or a short name [default: smollm2]. Without a prompt, a conversation starts if
    this is a terminal. Text on standard input goes before the prompt; if PROMPT is -, it is the prompt.
    """
    started = time.monotonic()
    closed_objects = constraint.pop("closed_objects")
    cache = _PromptCache(*(constraint.pop(f"prompt_cache{name}") for name in ("", "_all", "_ro")))
    params = replace(sampling_params(sampling_options), structured_outputs=_constraint(**constraint))
    images = [file for file in files if _is_image(file)]
    texts = tuple(file for file in files if file not in images)
    default, model = _default_and_named(model)
    given, is_marked = _words(words, model, prompt), prompt is not None
    model, prompt = _model_and_prompt(given, default, texts, has_images=bool(images), is_marked=is_marked)
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw skips: use only one of them")
    if params.logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json, which shows them")
    if lora is not None:
        engine_options = {**engine_options, "lora_modules": {_ADAPTER: lora}}
    if prompt is None:
        cache.refuse("a conversation keeps its prompts in memory")
        from octavo.cli.chat import converse

        converse(model, system, engine_options, sampling_options, adapter="" if lora is None else _ADAPTER)
        return
    with load_model(model, engine_options, will_chat=not raw) as llm:
        load_s = time.monotonic() - started
        llm.check_generates()
        asked = _with_images(llm, prompt, images) if raw else llm.chat_prompt(_messages(system, prompt, images))
        params = params.with_defaults(llm.sampling_defaults.without(sampling_options))
        options = {"closed_objects": closed_objects, "id_slot": 0, **({} if lora is None else {"adapter": _ADAPTER})}
        cache.restore(llm)
        parts = _stream(llm, asked, params, options, show=not as_json)
        cache.save(llm, parts[-1])
        report = _report(model, prompt, parts, load_s, time.monotonic() - started)
        if as_json:
            write_json(report, indent=None)
        if verbose:
            click.echo(_summary(report["timings"]), err=True)
        if "max_tokens" not in sampling_options:
            say_limit(parts[-1])
        with suppress(KeyboardInterrupt):  # the answer is complete, and a later run can write the cache
            llm.wait_until_kept()


@dataclass(frozen=True, slots=True)
class _PromptCache:
    """The file of `--prompt-cache`, as in llama.cpp.

    It is read if it exists, and written if a part of the prompt is missing from it.

    keeps_answer: always write the file, including the answer
    """

    path: str | None
    keeps_answer: bool
    is_read_only: bool

    def __post_init__(self) -> None:
        if self.path is None and (self.keeps_answer or self.is_read_only):
            raise UsageError("--prompt-cache-all and --prompt-cache-ro need --prompt-cache FILE")
        if self.keeps_answer and self.is_read_only:
            raise UsageError("--prompt-cache-all writes the file and --prompt-cache-ro forbids it: leave one out")
        if self.is_read_only and not Path(str(self.path)).exists():
            raise UsageError(f"--prompt-cache {self.path}: no such file; leave out --prompt-cache-ro to create it")

    def refuse(self, reason: str) -> None:
        if self.path is not None:
            raise UsageError(f"--prompt-cache needs a prompt: {reason}")

    def restore(self, llm: LLM) -> None:
        if self.path is not None and Path(self.path).exists():
            llm.restore_prompt(str(Path(self.path).resolve()))

    def save(self, llm: LLM, last: RequestOutput) -> None:
        """Save the prompt of an answer. A failure only causes a warning, because the answer is complete."""
        if self.path is None or self.is_read_only:
            return
        num_tokens, num_cached, size = len(last.prompt_token_ids), last.num_cached_tokens, llm.block_size
        is_there = num_cached and num_cached == (num_tokens - 1) // size * size
        if not self.keeps_answer and (is_there or num_tokens < size):
            return
        try:
            llm.save_prompt(str(Path(self.path).resolve()), max_tokens=None if self.keeps_answer else num_tokens)
        except UsageError as error:
            click.echo(f"warning: {error}", err=True)


def _constraint(
    schema: str | None, grammar: str | None, regex: str | None, choice: tuple[str, ...]
) -> StructuredOutputsParams | None:
    """Return the constraint on the answer, if any.

    Raises UsageError if several are given, or if the file of --schema contains no JSON schema.
    """
    values = {"schema": schema, "grammar": grammar, "regex": regex, "choice": choice or None}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(f'--{name}' for name in given)} exclude each other: give one of them")
    if schema is not None:
        try:
            return StructuredOutputsParams(json=json.loads(_read(schema)))
        except ValueError as error:
            raise UsageError(f"--schema {schema}: not a valid JSON schema: {error}") from error
    return StructuredOutputsParams(**given) if given else None


def _is_image(file: str) -> bool:
    """Return True for a file that begins like an image, a PDF document or a video, and False if it cannot be read."""
    from octavo.media.headers import begins_image
    from octavo.media.reels import kind_of

    with suppress(OSError):
        if file != "-":
            with open(file, "rb") as opened:
                begin = opened.read(1024)
                return begins_image(begin) or kind_of(begin) != "image"
    return False


def _with_images(llm: LLM, prompt: str, images: list[str]) -> PromptInput:
    """Return a raw prompt that begins with the images, and with the text of documents that are read as text."""
    texts = [llm.document_text(file) for file in images]
    prompt = "\n\n".join(filter(None, [*texts, prompt]))
    images = [file for file, text in zip(images, texts, strict=True) if text is None]
    if not images:
        return llm.encode(prompt)
    return {"prompt": llm.image_mark * len(images) + prompt, "multi_modal_data": {"image": images}}


def _default_and_named(model: str | None) -> tuple[str, str | None]:
    """Return the default model, possibly set by the configuration file, and the model named on the command line."""
    source = click.get_current_context().get_parameter_source("model")
    if model is not None and source is ParameterSource.DEFAULT_MAP:
        return model, None
    return DEFAULT_MODEL, model


def _words(words: tuple[str, ...], model: str | None, prompt: str | None) -> tuple[str | None, list[str]]:
    """Return the model, if one is named, and the prompt as a list of at most one word. Raises UsageError if either is
    given twice.
    """
    rest = list(words)
    if len(rest) > 2:
        raise UsageError(f"run takes a model and a prompt, not {len(rest)} words: quote the prompt")
    if model is None and rest and (len(rest) == 2 or prompt is not None or _is_model(rest[0])):
        model = rest.pop(0)
    elif model is not None and len(rest) == 2:
        raise UsageError(f"--model and the word {rest[0]!r:.80} both name the model: leave one out")
    if prompt is not None and rest:
        raise UsageError(f"--prompt and the word {rest[-1]!r:.80} both give the prompt: leave one out")
    return model, rest if prompt is None else [prompt]


def _model_and_prompt(
    given: tuple[str | None, list[str]], default: str, files: tuple[str, ...], *, has_images: bool, is_marked: bool
) -> tuple[str, str | None]:
    """Return the model and the prompt. The prompt is None for a conversation at the terminal.

    The texts of files and of standard input come first in the prompt.

    given: result of `_words`
    has_images: whether images are given, so that the prompt may be empty
    is_marked: whether the word comes from --prompt

    Raises UsageError if there is no prompt.
    """
    named, rest = given
    model = default if named is None else named
    has_input = not is_terminal(sys.stdin)
    if not rest and not has_input and not files and not has_images:
        if named is not None:
            return model, None
        raise UsageError("the prompt is missing: octavo run [MODEL] PROMPT; for a conversation: octavo chat")
    question = "" if rest in ([], ["-"]) else rest[0]
    texts = [_read(file) for file in files]
    if rest == ["-"] or (has_input and "-" not in files):
        texts.append(_read("-"))
    # A script without input has an empty standard input.
    prompt = "\n\n".join(text for text in (*texts, question) if text.strip())
    if not prompt and not has_images:
        raise UsageError("the prompt is empty: octavo run [MODEL] PROMPT")
    if named is None and not (is_marked or any(texts) or has_images):
        _refuse_near_miss(question, default)
    return model, prompt


def _read(file: str) -> str:
    """Read the text of a file, or standard input for `-`. Raises UsageError if it cannot be read."""
    try:
        if file != "-":
            return Path(file).read_text("utf-8")
        return "" if sys.stdin is None else sys.stdin.read()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is not UTF-8; a text file is needed") from error


def _is_model(word: str) -> bool:
    """Return True if a single word names a model: a file, a hub id or address, or a name from `octavo list --all`."""
    if word.endswith((".gguf", ".safetensors")):
        return True
    with suppress(OSError, ValueError):  # a prompt can be longer than a path
        if word and (Path(word) / "config.json").is_file():
            return True
    if len(word.split()) != 1 or not any(c.isalpha() for c in word):
        return False
    from octavo.loader.aliases import ALIASES
    from octavo.loader.named_models import find
    from octavo.loader.references import parse

    try:
        return word.lower() in ALIASES or find(word) is not None or parse(word) is not None
    except ModelLoadError:  # not an address of a model; loading explains it
        return True


def _refuse_near_miss(word: str, default: str) -> None:
    """Raise UsageError if the only word is almost a model's name, because then it is unlikely to be a question."""
    from octavo.loader.aliases import ALIASES
    from octavo.loader.catalogue import nearest

    if len(word.split()) == 1 and (near := nearest(word, ALIASES, likeness=0.75)):
        raise UsageError(
            f"there is no model {word}; did you mean {near}? If it is a prompt: octavo run {default} {word}"
        )


def _messages(system: str | None, prompt: str, images: list[str]) -> list[dict[str, Any]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    parts: list[dict[str, str]] = [{"type": "image", "image": image} for image in images]
    texts = [{"type": "text", "text": prompt}] if prompt else []
    return [*before, {"role": "user", "content": [*parts, *texts] if images else prompt}]


def _stream(
    llm: LLM, prompt: PromptInput, params: SamplingParams, options: dict[str, Any], *, show: bool
) -> list[RequestOutput]:
    parts = []
    with llm.stream(prompt, params, **options) as stream:
        try:
            for part in parts_of(stream):
                parts.append(part)
                if show:
                    write(part.outputs[0].text)
        except KeyboardInterrupt:
            if show:
                write("\n")  # the shell's prompt starts on a new line
            raise
    if show:
        write("\n")
    return parts


def _report(model: str, prompt: str, parts: list[RequestOutput], load_s: float, total_s: float) -> dict[str, Any]:
    last = parts[-1]
    metrics = last.metrics
    decoded = metrics.num_generated_tokens - 1
    computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
    timings = {
        "load_s": load_s,
        "total_s": total_s,
        **asdict(metrics),
        "prefill_tokens_per_s": computed / metrics.prefill_s if metrics.prefill_s else None,
        "decode_tokens_per_s": decoded / metrics.decode_s if metrics.decode_s else None,
    }
    report: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "text": "".join(part.outputs[0].text for part in parts),
        "finish_reason": last.outputs[0].finish_reason,
        "stop_reason": last.outputs[0].stop_reason,
        "prompt_token_ids": last.prompt_token_ids,
        "token_ids": [i for part in parts for i in part.outputs[0].token_ids],
        "timings": timings,
    }
    entries = [entry for part in parts for entry in part.outputs[0].logprobs or []]
    if entries:
        report["logprobs"] = [{str(i): asdict(logprob) for i, logprob in entry.items()} for entry in entries]
    return report


def _summary(timings: dict[str, Any]) -> str:
    """Return counts, times and rates, one per line."""
    rates = [timings["prefill_tokens_per_s"], timings["decode_tokens_per_s"]]
    drafts = ""
    if drafted := timings["num_draft_tokens"]:
        right = timings["num_accepted_draft_tokens"]
        steps = max(timings["num_generated_tokens"] - 1 - right, 1)
        drafts = f"drafts  {right:,} of {drafted:,} right, {(steps + right) / steps:.2f} tokens per step\n"
    prefill, decode = (f", {rate:,.0f} tokens/s" if rate else "" for rate in rates)
    return (
        f"load    {timings['load_s']:.2f} s\n"
        f"prompt  {timings['num_prompt_tokens']:,} tokens ({timings['num_cached_tokens']:,} cached) "
        f"in {timings['prefill_s']:.2f} s{prefill}\n"
        f"answer  {timings['num_generated_tokens']:,} tokens in {timings['decode_s']:.2f} s{decode}\n"
        f"{drafts}"
        f"total   {timings['total_s']:.2f} s"
    )
