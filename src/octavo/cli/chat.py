"""`octavo chat`: chat at the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo import env
from octavo.cli.chat_images import dropped_images
from octavo.cli.chat_input import ChatInput
from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.markdown import MarkdownStyle
from octavo.cli.options import (
    DEFAULT_MODEL,
    MODEL_DEFAULTS,
    Options,
    in_flags,
    parse_sampling_value,
    sampling_names,
    sampling_params,
    with_engine_options,
    with_sampling_options,
)
from octavo.cli.terminal import (
    find_model,
    has_colour,
    is_terminal,
    load_model,
    parts_of,
    say_limit,
    write,
    write_facts,
)
from octavo.cli.word_wrap import WordWrap
from octavo.errors import EngineDeadError, ModelWriteError, OctavoError, UsageError
from octavo.tokenizer.turns import fit_turns

if TYPE_CHECKING:
    from octavo.engine.texts.placing import ItemSeries
    from octavo.llm import LLM
    from octavo.prompt import MediaItem, Prompt
    from octavo.sampling_params import SamplingParams

_HELP = """/clear          start a new conversation (also /reset)
/system TEXT    start a new conversation with this system message; without TEXT, the model's own
/set NAME VALUE set a sampling parameter; /set alone lists them
/save FILE      write the conversation to a file; /load FILE continues it
/image FILE     send an image with the next message, or drop its file at the end of the message
/regenerate     answer the last message again
/model NAME     switch to another model; /model alone shows the current one
/show           show the model, the sampling parameters and the length of the conversation
/help           show this list (also /?)
/exit           exit (or Ctrl-D)
Ctrl-C          stop the answer
\"\"\"             begin a message of several lines; \"\"\" ends it
"""
_ALIASES = {"/?": "/help", "/reset": "/clear", "/quit": "/exit", "/bye": "/exit"}
_MAX_FILE_BYTES = 64 << 20
# Options that apply only to the first model.
_OF_ONE_MODEL = frozenset(
    {
        "revision",
        "lora_modules",
        "default_lora",
        "chat_template",
        "mmproj",
        "draft_model",
        "speculative_config",
        "max_model_len",
    }
)


@click.command(cls=HeadedCommand)
@click.argument("model", shell_complete=complete_model, default=DEFAULT_MODEL)
@click.option("--system", help="system message")
@click.option("--no-trim", is_flag=True, help="stop when the context is full instead of dropping the oldest turns")
@with_engine_options
@with_sampling_options
def chat(*, model: str, system: str | None, no_trim: bool, engine_options: Options, sampling_options: Options) -> None:
    """Chat with a model. Type /help to list the commands.

    MODEL is a path, a hub id or a short name [default: smollm2].
    """
    converse(model, system, engine_options, sampling_options, trims=not no_trim)


def converse(
    model: str,
    system: str | None,
    engine_options: Options,
    sampling_options: Options,
    *,
    trims: bool = True,
    adapter: str = "",
) -> None:
    """Load the model and answer the messages from standard input.

    trims: drop the oldest turns when the context is full (`--no-trim` turns this off).
    adapter: name of a loaded adapter, or empty for none.
    """
    sampling_params(sampling_options)  # reports errors before the model is loaded
    with closing(_Loaded(model, engine_options)) as loaded:
        if is_terminal(sys.stdin):
            write("Type /help for help, Ctrl-D to exit\n")
        conversation = _Conversation(loaded, sampling_options, system, trims=trims)
        conversation.adapter = adapter
        conversation.encode()  # refuses a model without a chat template before the first question
        for message in ChatInput([*_Conversation.COMMANDS, *_ALIASES]).messages():
            if not conversation.take(message):
                break


class _Loaded:
    """The conversation's current model."""

    def __init__(self, name: str, options: Options) -> None:
        self.name, self._options = name, options
        self.llm = self._load(name)

    def replace(self, name: str) -> None:
        """Load another model; if that fails, reload this one. Raises OctavoError."""
        find_model(name, {})  # an invalid name or a failed download must not unload the current model
        before = self._options
        self._options = {key: value for key, value in before.items() if key not in _OF_ONE_MODEL}
        self.close()
        try:
            self.llm = self._load(name)
            self.llm.chat_prompt("Hi")  # raises without a chat template
        except OctavoError:
            self.close()
            self._options = before
            self.llm = self._load(self.name)
            raise
        self.name = name

    def close(self) -> None:
        """Unload the model and free its memory."""
        self.llm.close()

    def _load(self, name: str) -> LLM:
        llm = load_model(name, self._options, will_chat=True)
        try:
            llm.check_generates()
        except OctavoError:
            llm.close()
            raise
        return llm


class _Conversation:
    """The messages so far, and the commands that change them.

    given: sampling parameters set by the user
    trims: drop the oldest turns when the context is full
    """

    def __init__(self, loaded: _Loaded, given: Options, system: str | None, *, trims: bool) -> None:
        self._loaded = loaded
        self._given = dict(given)
        self.adapter = ""  # name, or empty for none
        self._system = system
        self._trims = trims
        self._messages: list[dict[str, Any]] = []
        self._waiting: list[Path] = []  # images for the next message
        self._texts: list[str] = []  # texts of documents for the next message
        self._items: dict[str, MediaItem | ItemSeries] = {}  # by path, as written in the messages
        self._clear("")

    @property
    def _llm(self) -> LLM:
        return self._loaded.llm

    @property
    def _params(self) -> SamplingParams:
        """The sampling parameters: those set by the user, and the model's defaults for the rest."""
        return sampling_params(self._given).with_defaults(self._llm.sampling_defaults.without(self._given))

    def encode(self) -> tuple[Prompt, int]:
        """Return the prompt for the conversation and the number of turns that were dropped.

        Before the first question, it is the prompt for a greeting.
        """
        has_question = any(message["role"] == "user" for message in self._messages)
        messages = self._messages if has_question else [*self._messages, {"role": "user", "content": "Hi"}]
        messages = [{**message, "content": self._with_items(message["content"])} for message in messages]
        if not self._trims:
            return self._llm.chat_prompt(messages), 0
        limit = self._llm.max_model_len
        room = limit - min(self._params.max_tokens or limit, limit // 4)
        return fit_turns(messages, self._llm.chat_prompt, room)

    def take(self, message: str) -> bool:
        """Run a command or answer a question. Return False if the user exits."""
        message = message.strip()
        dropped: list[Path] = []
        if message.partition(" ")[0] != "/image":
            message, dropped = dropped_images(message)
        if dropped and not self._attach(dropped):
            return True
        command, _, rest = message.partition(" ")
        command = _ALIASES.get(command, command)
        if command == "/exit":
            return False
        if command in self.COMMANDS and "\n" not in message:
            try:
                self.COMMANDS[command](self, rest.strip())
            except UsageError as error:
                write(f"{error}\n")
        elif command.startswith("/") and command[1:].isalpha() and "\n" not in message:
            write(f"Unknown command {command}; /help lists all commands.\n")
        elif message:
            self._answer(message)
        return True

    def _attach(self, paths: Sequence[Path]) -> bool:
        """Read files for the next message and show their token counts. Return False if one cannot be read."""
        for path in paths:
            try:
                if (text := self._llm.document_text(path)) is not None:
                    self._texts.append(text)
                    write(f"attached {path.name} (its text, {len(self._llm.encode(text))} tokens)\n")
                    continue
                item = self._items[str(path)] = self._llm.read_image(path)
            except UsageError as error:
                write(f"{path.name}: {error}\n")
                return False
            self._waiting.append(path)
            write(f"attached {path.name} ({item.description}, {item.num_rows} tokens)\n")
        return True

    def _image(self, file: str) -> None:
        self._attach([_file(file.strip("'\""), "/image")])

    def _with_items(self, content: str | list[dict[str, str]]) -> Any:
        """Return the content with decoded images in place of their paths."""
        if isinstance(content, str):
            return content
        return [
            {"type": "image", "image": self._items[part["image"]]} if part["type"] == "image" else part
            for part in content
        ]

    def _clear(self, _: str, said: str = "") -> None:
        self._waiting, self._texts = [], []
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        write(said)

    def _set_system(self, text: str) -> None:
        self._system = text or None
        own = "the model's own system message, if any"
        self._clear("", f"New conversation with {'this system message' if self._system else own}.\n")

    def _set(self, text: str) -> None:
        """Set one sampling parameter, or list all of them."""
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if not name:
            write("".join(f"{known:<27} {getattr(self._params, known)}\n" for known in sampling_names()))
            return
        chosen = {**self._given, name: parse_sampling_value(name, value.strip())}
        sampling_params(chosen)  # raises
        self._given = chosen
        write(f"{name} is now {getattr(self._params, name)}\n")

    def _save(self, file: str) -> None:
        from octavo.loader.atomic_file import write_text

        path = Path(os.path.realpath(_file(file, "/save")))  # follow links
        try:
            write_text(path, json.dumps({"messages": self._messages}, ensure_ascii=False, indent=1) + "\n")
        except ModelWriteError as error:
            raise UsageError(str(error)) from error
        write(f"Saved {len(self._messages)} messages to {path}\n")

    def _load(self, file: str) -> None:
        messages = _read_messages(_file(file, "/load"))
        for path in _images_of(messages):
            self._items[path] = self._llm.read_image(path)
        self._messages = messages
        first = self._messages[0] if self._messages else {}
        self._system = first["content"] if first.get("role") == "system" else None
        write(f"The conversation has {len(self._messages)} messages.\n")

    def _regenerate(self, _: str) -> None:
        """Answer the last message again, with another seed."""
        has_answer = bool(self._messages) and self._messages[-1]["role"] == "assistant"
        answer = self._messages.pop() if has_answer else None
        if not self._messages or self._messages[-1]["role"] != "user":
            write("There is no message to answer yet.\n")
        elif not self._reply(replace(self._params, seed=None)) and answer is not None:
            self._messages.append(answer)

    def _set_model(self, name: str) -> None:
        if not name:
            write(f"{self._loaded.name}\n")
            return
        try:
            self._loaded.replace(name)
        except EngineDeadError:
            raise
        except OctavoError as error:
            write(f"{in_flags(str(error))}\n")
            return
        self.adapter = ""
        write(f"Switched to {name}.\n")
        if _images_of(self._messages) or self._waiting:
            self._clear("", "New conversation: images do not carry over to another model.\n")

    def _show(self, _: str) -> None:
        params, length = self._params, len(self.encode()[0].token_ids) if self._messages else 0
        write_facts(
            {
                "model": self._loaded.name,
                "context": f"{self._llm.max_model_len:,} tokens, {length:,} in use",
                "system": self._system or "the model's own, if any",
                "sampling": ", ".join(f"{name} {getattr(params, name)}" for name in (*MODEL_DEFAULTS, "max_tokens")),
            }
        )

    COMMANDS = {  # noqa: RUF012 - no instance changes it
        "/help": lambda *_: write(_HELP),
        "/clear": lambda self, rest: self._clear(rest, "New conversation.\n"),
        "/system": _set_system,
        "/set": _set,
        "/image": _image,
        "/regenerate": _regenerate,
        "/model": _set_model,
        "/show": _show,
        "/save": _save,
        "/load": _load,
    }

    def _answer(self, question: str) -> None:
        parts: list[dict[str, str]] = [{"type": "image", "image": str(path)} for path in self._waiting]
        question = "\n\n".join([*self._texts, question])
        self._waiting, self._texts = [], []
        content = [*parts, {"type": "text", "text": question}] if parts else question
        self._messages.append({"role": "user", "content": content})
        if not self._reply(self._params):
            self._messages.pop()

    def _reply(self, params: SamplingParams) -> bool:
        """Answer the last message. Return False if that fails."""
        pieces: list[str] = []
        last, is_stopped = None, False
        wrap = WordWrap(None if is_terminal(sys.stdout) else 0, MarkdownStyle() if has_colour() else None)
        try:
            prompt, num_dropped = self.encode()
            if num_dropped:
                turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
                click.echo(f"octavo: the context is full: the oldest {turns} dropped (see --no-trim)", err=True)
            with self._llm.stream(prompt, params, adapter=self.adapter) as stream:
                for part in parts_of(stream):
                    pieces.append(part.outputs[0].text)
                    wrap.write(pieces[-1])
                    last = part
        except KeyboardInterrupt:  # the partial answer stays in the conversation
            is_stopped = True
        except EngineDeadError:
            wrap.end()
            raise
        except OctavoError as error:  # for example, the question alone exceeds the context
            wrap.end()
            click.echo(f"octavo: {in_flags(str(error))} (/clear starts a new conversation)", err=True)
            return False
        wrap.end()
        write("\n(stopped)\n" if is_stopped else "\n")
        if last is not None and "max_tokens" not in self._given:
            say_limit(last)
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        return True


def _file(name: str, command: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs a file, for example {command} talk.json")
    return env.user_path(name)


def _images_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths of the images in messages."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _is_content(content: object) -> bool:
    """Return True for a text, or a list of texts and image paths."""
    return isinstance(content, str) or (
        isinstance(content, list)
        and all(
            isinstance(part, dict) and part.get("type") in ("text", "image") and isinstance(part.get(part["type"]), str)
            for part in content
        )
    )


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Read messages written by `/save`. Raises UsageError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB; not a conversation")
        value: Any = json.loads(path.read_text("utf-8"))
        messages: Sequence[Any] = value["messages"]
        kept = [{"role": m["role"], "content": m["content"]} for m in messages]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not a conversation written by /save") from error
    if not all(m["role"] in ("system", "user", "assistant") and _is_content(m["content"]) for m in kept):
        raise UsageError(f"{path}: a message has no text, or its role is not system, user or assistant")
    return kept
