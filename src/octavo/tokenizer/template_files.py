"""The chat templates in a model's files, in GGUF files and in checkpoint folders.

Source: transformers' `save_chat_templates`, and the GGUF specification, section "Chat template".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.json_file import MAX_SIDE_BYTES, read_optional
from octavo.tokenizer.template_set import TOOL_USE, TemplateSet

NAMED_FOLDER = "additional_chat_templates"
GGUF_KEY = "tokenizer.chat_template"
MAX_TEMPLATES = 32


def read_directory_templates(directory: Path) -> TemplateSet | None:
    """Read the templates in a checkpoint's folder. Return None if there are none. Raises ModelLoadError.

    The default template is in the first of these files that has one: `chat_template.jinja`, `tokenizer_config.json`,
    and the processor's `chat_template.json`. In the last two, a list may also contain named templates. More named
    templates are in `additional_chat_templates/NAME.jinja`.
    """
    path = directory / "tokenizer_config.json"
    templates = _configured(path, read_optional(path).get("chat_template"))
    if not templates:
        path = directory / "chat_template.json"
        templates = _configured(path, read_optional(path).get("chat_template"))
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = _text(file)
    for file in named_template_paths(directory):
        templates[file.stem] = _text(file)
    if templates and not {"default", TOOL_USE} & templates.keys():
        raise ModelLoadError(f"{path}: chat_template names no default template, only {', '.join(templates):.200}")
    return TemplateSet.of(templates)


def named_template_paths(directory: Path) -> list[Path]:
    """Return the paths of a model's named templates."""
    return sorted((directory / NAMED_FOLDER).glob("*.jinja"))[:MAX_TEMPLATES]


def read_gguf_templates(metadata: Mapping[str, object]) -> TemplateSet | None:
    """Read the templates in a GGUF file: `tokenizer.chat_template`, with the suffix `.NAME` for named ones."""
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == GGUF_KEY or key.startswith(f"{GGUF_KEY}."):
            if not isinstance(value, str):
                raise ModelLoadError(f"{key} is {value!r:.60} ({type(value).__name__}); it must be a string")
            templates[key[len(GGUF_KEY) + 1 :] or "default"] = value
    return TemplateSet.of(templates)


def gguf_templates(templates: TemplateSet | None) -> dict[str, str | list[str]]:
    """Return the keys for these templates in a GGUF file."""
    if templates is None:
        return {}
    keys: dict[str, str | list[str]] = {GGUF_KEY: templates.default}
    keys |= {f"{GGUF_KEY}.{name}": source for name, source in templates.named.items()}
    if templates.named:
        keys["tokenizer.chat_templates"] = list(templates.named)
    return keys


def template_files(templates: TemplateSet | None) -> dict[str, str]:
    """Return the files for these templates in a checkpoint's folder, by path."""
    if templates is None:
        return {}
    named = {f"{NAMED_FOLDER}/{name}.jinja": source for name, source in templates.named.items()}
    return {"chat_template.jinja": templates.default, **named}


def _configured(path: Path, value: object) -> dict[str, str]:
    """Return the templates in a configuration by name. The value is one text, or a list with names."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        found = {str(entry.get("name")): entry.get("template") for entry in entries[:MAX_TEMPLATES]}
    else:
        found = {} if value is None else {"default": value}
    templates: dict[str, str] = {}
    for name, template in found.items():
        if not isinstance(template, str):
            kind = type(template).__name__
            raise ModelLoadError(f"{path}: chat_template {name!r:.40} is a {kind}; it must be a string")
        templates[name] = template
    return templates


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_SIDE_BYTES:
        raise ModelLoadError(f"{path} has {size:,} bytes; the limit is {MAX_SIDE_BYTES:,}")
    return path.read_text("utf-8", "replace")
