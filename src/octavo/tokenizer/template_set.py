"""The chat templates that come with a model: the default template and named ones.

Source: transformers, `PreTrainedTokenizerBase.get_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOL_USE = "tool_use"


@dataclass(frozen=True, slots=True)
class TemplateSet:
    """The sources of a model's templates, as in its files.

    named: all templates except the default one
    """

    default: str
    named: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, templates: Mapping[str, str]) -> TemplateSet | None:
        """Return a set of these templates by name. `tool_use` replaces a missing default. Returns None if neither
        exists.
        """
        default = templates.get("default", templates.get(TOOL_USE))
        if not default:
            return None
        return cls(default, {name: source for name, source in templates.items() if name != "default"})

    def chosen(self, *, has_tools: bool) -> str:
        """Return the source for a conversation with or without tools."""
        return self.named.get(TOOL_USE, self.default) if has_tools else self.default

    def get(self, name: str) -> str | None:
        """Return the source of the template with this name, or None."""
        return self.default if name == "default" else self.named.get(name)
