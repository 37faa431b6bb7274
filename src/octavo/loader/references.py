"""Parses names of hub models: short names, `org/name:Q4_K_M`, `hf.co/org/name`, and web addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from octavo.errors import ModelLoadError
from octavo.loader import catalogue

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<variant>[\w.-]+))?", re.ASCII)
_PATH_LIKE = re.compile(r"[./~].*|.*\.(gguf|safetensors)", re.DOTALL)
_SHORT_HOST = re.compile(r"(?:https?://)?hf\.co/(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,199}", re.ASCII)
_PAGES = ("tree", "blob", "resolve", "raw")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model on the hub.

    variant: type of a GGUF file.
    file: path of a single file.
    revision: None means the newest.
    """

    repository: str
    variant: str | None = None
    file: str | None = None
    revision: str | None = None

    @property
    def label(self) -> str:
        """The whole reference as one name."""
        part = self.variant or self.file
        name = f"{self.repository}:{part}" if part else self.repository
        return f"{name} at revision {self.revision}" if self.revision else name


def parse(name: str) -> Reference | None:
    """Return the model that a name means, or None if it cannot be on the hub.

    Raises ModelLoadError for an unsupported URL.
    """
    if (found := catalogue.find(name)) is not None:
        return Reference(*found)
    short = _SHORT_HOST.fullmatch(name)
    if short is not None or re.match(r"https?://", name, re.IGNORECASE):
        return _from_address(name, short["rest"] if short else urlsplit(name).path.lstrip("/"), is_short=bool(short))
    match = _HUB_ID.fullmatch(name)
    if match is None or _PATH_LIKE.fullmatch(name):
        return None
    return Reference(match["repository"], match["variant"])


def with_revision(reference: Reference, revision: str | None) -> Reference:
    """Return the reference at a branch, tag or commit. Raises ModelLoadError."""
    if revision is None:
        return reference
    if not _REVISION.fullmatch(revision):
        raise ModelLoadError(f"revision {revision!r:.80} is not a branch, tag or commit of the hub")
    return replace(reference, revision=revision)


def _from_address(name: str, path: str, *, is_short: bool) -> Reference:
    if not is_short:
        from huggingface_hub.constants import ENDPOINT

        if urlsplit(name).netloc.lower() != urlsplit(ENDPOINT).netloc.lower():
            raise ModelLoadError(f"{name:.200}: models come from {ENDPOINT} or from paths; download the file yourself")
    pieces = unquote(path).split("?")[0].strip("/").split("/")
    match = _HUB_ID.fullmatch("/".join(pieces[:2]))
    rest = pieces[2:]
    if match is None or (rest and (rest[0] not in _PAGES or len(rest) < 2)):
        raise ModelLoadError(f"{name:.200}: not the address of a hub model, such as hf.co/org/name:Q4_K_M")
    reference = Reference(match["repository"], match["variant"])
    if not rest:
        return reference
    file = "/".join(rest[2:]) or None
    if file is not None and not file.endswith(".gguf"):
        raise ModelLoadError(f"{name:.200}: only addresses of GGUF files can be opened; give the repository instead")
    return with_revision(replace(reference, file=file), None if rest[1] == "main" else rest[1])
