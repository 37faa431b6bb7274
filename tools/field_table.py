"""The table of other products' fields in docs/openai.md: honoured, accepted and named, or refused by name.

`python -m tools.openai_matrix --check` compares the page that contains this table. The treatment of a field comes from
the request models and their tables of ignored fields, not from the lists of fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.client_fields import CLIENT_FIELDS
from tools.field_entries import NAMED, Route

HONOURED, IGNORED, REFUSED = "honoured", "named in the header", "refused by name"


def fate(route: Route, name: str) -> str:
    """Return which of the three labels applies to a field of this route.

    Refused fields are missing from the request model, or accept only null, which has no effect.
    """
    entries = route.described()
    if name not in entries or (entries[name].right is None and entries[name].without_effect):
        return REFUSED
    if name in getattr(route.model, "ignored_fields", ()) or entries[name].without_effect == NAMED:
        return IGNORED
    return HONOURED


def table(routes: Sequence[Route]) -> str:
    """Return this section of the page. Raises KeyError for a route that is not described."""
    by_path: Mapping[str, Route] = {f"{route.path} {route.nest}".strip(): route for route in routes}
    parts = [
        "\n## Fields of other products\n\n"
        "A field is honoured, refused by name (if ignoring it would change the answer), or accepted and named in "
        "`x-octavo-ignored-fields` (if it only controls the other product's internals). The rows of vLLM and llama.cpp "
        "list the fields that they add to OpenAI's.\n\n"
        f"| Product | Route | {HONOURED.capitalize()} | {IGNORED.capitalize()} | {REFUSED.capitalize()} |\n"
        "|---|---|---|---|---|\n"
    ]
    for product, lists in CLIENT_FIELDS.items():
        for path, names in lists.items():
            fates = {name: fate(by_path[path], name) for name in names.split()}
            cells = (
                ", ".join(f"`{name}`" for name in fates if fates[name] == kind) for kind in (HONOURED, IGNORED, REFUSED)
            )
            parts.append(f"| {product} | `{path}` | {' | '.join(cells)} |\n")
    return "".join(parts)
