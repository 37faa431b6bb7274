"""Calls as a list in tags, `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano 2.

Nemotron 3 uses qwen3_coder's format. Source: the chat template of NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from octavo.server.tool_parsers.listed import listed_format

FORMAT = listed_format("nemotron", ("<TOOLCALL>", "</TOOLCALL>"), lambda template: "<TOOLCALL>" in template)
