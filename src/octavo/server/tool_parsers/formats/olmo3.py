"""Calls as Python, one per line, in tags, `<function_calls>NAME(KEY=VALUE, ...)</function_calls>`: OLMo 3.

Source: the chat template of Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from octavo.server.tool_parsers.formats.pythonic import marked_format

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"

FORMAT = marked_format("olmo3", (_OPEN, _CLOSE), lambda template: _OPEN in template, is_lined=True)
