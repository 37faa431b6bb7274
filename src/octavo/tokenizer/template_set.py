"""The chat templates that come with a model: the default one, and others by name.

Source: transformers, `PreTrainedTokenizerBase.get_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """Sources of templates, as in the model's files.

    named: without the default one.
    """

    default: str
    named: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, templates: Mapping[str, str]) -> TemplateSet | None:
        """These templates by name. `tool_use` replaces a missing default one. None if neither exists."""
        default = templates.get("default", templates.get(TOOL_USE))
        if not default:
            return None
        return cls(default, {name: source for name, source in templates.items() if name != "default"})

    def chosen(self, *, has_tools: bool) -> str:
        """The source for a conversation with or without tools."""
        return self.named.get(TOOL_USE, self.default) if has_tools else self.default

    def get(self, name: str) -> str | None:
        """The source of this name, or None."""
        return self.default if name == "default" else self.named.get(name)
