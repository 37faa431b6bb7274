"""The formats in which models write tool calls, and the parser and the grammars that the formats are built from."""
