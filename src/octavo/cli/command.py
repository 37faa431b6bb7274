"""Commands with many options: a short help with the common options, and a full help with headings."""

from __future__ import annotations

from typing import Any

import click

# Engine, server and sampling options that the short help shows.
_COMMON = frozenset(
    {
        *("host", "port", "api_key", "api_key_file", "allow_unauthenticated"),
        *("max_model_len", "max_num_seqs", "kv_cache_memory", "num_threads", "quantization", "revision"),
        *("temperature", "top_p", "seed", "max_tokens", "stop"),
    }
)


class HeadedOption(click.Option):
    """An option shown under a heading in the full help."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.heading = heading


class HeadedCommand(click.Command):
    """A command with a short `--help` and a complete `--help-all`."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        full = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show every option and exit.",
        )
        return [*super().get_params(ctx), full] if self._has_headings else super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, then the rest under their headings."""
        is_full = not self._has_headings or bool(ctx.meta.get(_FULL))
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if not isinstance(param, click.Option):
                continue
            heading = param.heading if isinstance(param, HeadedOption) else "Options"
            if is_full or heading == "Options" or param.name in _COMMON:
                record = param.get_help_record(ctx)
                if record is not None:
                    sections.setdefault(heading if is_full else "Options", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    @property
    def _has_headings(self) -> bool:
        return any(isinstance(param, HeadedOption) for param in self.params)


_FULL = "octavo.full_help"


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[_FULL] = True
        click.echo(context.get_help())
        context.exit()
