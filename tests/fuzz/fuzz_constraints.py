"""Coverage-guided fuzzing of what constrains answers with atheris; `docs/fuzzing.md` has the command.

An input is a byte for the kind (a GBNF grammar, a pattern, a JSON schema) and its text. Octavo translates it into what
llguidance can enforce, or refuses it by the error of that kind; a translation is well-formed.
"""

from __future__ import annotations

import json

import atheris
import llguidance

with atheris.instrument_imports(include=["octavo.engine.texts"]):
    from octavo.engine.texts.gbnf import GbnfError
    from octavo.engine.texts.gbnf_to_lark import gbnf_to_lark
    from octavo.engine.texts.patterns import PatternError, translate_pattern
    from octavo.engine.texts.schemas import UnenforceableError, enforceable_schema

from tests.fuzz.target import run

SEEDS = {
    "list": b'\x00root ::= item+\nitem ::= "- " [^\\n]{1,9} "\\n" | "\\u00e9" [a-z_-]?\n',
    "ranges": b'\x00root ::= ("a" | b){2,}\nb ::= [\\x41-\\x5A] # comment\n',
    "pattern": b'\x01^[^"\\\\]+(a|\\d{2,5}?)(?:x.)*$',
    "classes": b"\x01[\\w\\-\\]]\\s*[^<>\\x22]\\u00e9",
    "schema": b'\x02{"properties":{"a":{"pattern":"^[^\\"]+$"},"b":{"format":"date"}},"minProperties":1}',
    "references": b'\x02{"$defs":{"a":{"enum":[1,"x"]}},"items":{"$ref":"#/$defs/a"},"patternProperties":{"^x":{}}}',
}


def well_formed(kind: str, text: str) -> None:
    make = getattr(llguidance.LLMatcher, f"grammar_from_{kind}")
    is_broken, messages = llguidance.LLMatcher.validate_grammar_with_warnings(make(text))
    if is_broken and "parse" in " ".join(messages).lower():
        raise AssertionError(f"{text!r:.500}: {messages!r:.500}")


def read(content: bytes) -> None:
    kind, text = content[0] % 3 if content else 0, content[1:].decode("utf-8", "replace")
    try:
        if kind == 0:
            well_formed("lark", gbnf_to_lark(text))
        elif kind == 1:
            well_formed("regex", translate_pattern(text))
        else:
            schema = json.loads(text)
            if isinstance(schema, dict):
                json.dumps(enforceable_schema(schema))
    except (GbnfError, PatternError, UnenforceableError, json.JSONDecodeError) as error:
        if len(str(error)) > 2000:
            raise AssertionError(f"too long a message: {error}") from error
    except RecursionError:
        if kind != 2 or text.count("[") + text.count("{") < 90:  # the compiler counts depth before it translates
            raise


if __name__ == "__main__":
    run(read, SEEDS)
