"""Markdown of an answer at a terminal: styles in place of marks, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from octavo.cli.markdown import MarkdownStyle
from octavo.cli.word_wrap import WordWrap

BOLD, NOT_BOLD, CODE, NOT_CODE = "\x1b[1m", "\x1b[22m", "\x1b[36m", "\x1b[39m"
ITALIC, NOT_ITALIC = "\x1b[3m", "\x1b[23m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# A title\ntext", f"{BOLD}A title{NOT_BOLD}\ntext"),
        ("- one\n  * two", "• one\n  • two"),
        ("a **bold word** b", f"a {BOLD}bold word{NOT_BOLD} b"),
        ("call `f(x, y)` now", f"call {CODE}f(x, y){NOT_CODE} now"),
        ("an *odd* one", f"an {ITALIC}odd{NOT_ITALIC} one"),
        ("2 * 3 ** 4 and a*b", "2 * 3 ** 4 and a*b"),
        ("`**x**`", f"{CODE}**x**{NOT_CODE}"),
        ("**open\n\nnext", f"{BOLD}open\n{NOT_BOLD}\nnext"),
        ("```py\n# x\n**y\n```\n**z**", f"{CODE}```py{NOT_CODE}\n{CODE}#{NOT_CODE} {CODE}x{NOT_CODE}\n"
         f"{CODE}**y{NOT_CODE}\n{CODE}```{NOT_CODE}\n{BOLD}z{NOT_BOLD}"),
    ],
)  # fmt: skip
def test_marks_become_styles(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (1, 3, len(text)):
        wrap = WordWrap(40, MarkdownStyle())
        for at in range(0, len(text), size):
            wrap.write(text[at : at + size])
        wrap.end()
        assert capsys.readouterr().out == shown


def test_marks_take_no_columns(capsys: pytest.CaptureFixture[str]) -> None:
    wrap = WordWrap(11, MarkdownStyle())
    wrap.write("**hello** world again")
    wrap.end()
    assert capsys.readouterr().out == f"{BOLD}hello{NOT_BOLD} world\nagain"
