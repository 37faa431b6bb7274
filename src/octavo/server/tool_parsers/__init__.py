"""The formats in which models write tool calls, and the parser and the grammars that they are made of."""
