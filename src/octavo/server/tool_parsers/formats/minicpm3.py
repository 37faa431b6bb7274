"""Calls as Python, one per line, in a code fence between the marks that LFM2 also uses: MiniCPM 3.

Source: the chat template of MiniCPM3-4B.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.server.tool_parsers.calls import FENCE
from octavo.server.tool_parsers.formats.lfm2 import END, START, THOUGHT
from octavo.server.tool_parsers.formats.pythonic import marked_format

_LINED = marked_format(
    "minicpm3",
    (f"{START}\n{FENCE}python", f"{FENCE}\n{END}"),
    lambda template: START in template and THOUGHT in template,
    is_lined=True,
)
FORMAT = replace(_LINED, marks=(START, END))
