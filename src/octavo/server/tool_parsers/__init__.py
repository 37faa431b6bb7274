"""The formats in which models write tool calls, with the parser and the grammars that they are built from."""
