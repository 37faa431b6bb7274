"""Large bodies are read in pieces to the same values and errors as whole ones, and no list goes beyond its limit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from octavo.server.app import route_modules
from octavo.server.errors import ApiError
from octavo.server.http import json_pieces
from octavo.server.http.body_limits import MAX_FREE_ITEMS, MAX_ITEMS, MAX_TOKEN_IDS, BodyLimits
from octavo.server.http.json_body import MAX_DEPTH, Path, parse_object
from octavo.server.http.json_pieces import parse_large_object
from octavo.server.http.json_route import JsonRoute
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.openai.completion_request import CompletionRequest

ANY = BodyLimits([{}], {})
STRINGS = ["", "a", 'quote " and \\ backslash', "é漢😀", "\n\t\x7f", "\\u0041", "x" * 90, "😀" * 20, "]}[{,:"]


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice([True, False, None, 0, -1, 2**40, 1.5, -2e-9])
    if kind < 5:
        return rng.choice(STRINGS) * rng.choice([1, 1, 1, 20])
    size = rng.choice([0, 1, 2, 5, 30])
    if kind == 5:
        return [rng.randrange(100_000) for _ in range(size)]
    if kind == 6:
        return [random_value(rng, depth - 1) for _ in range(size)]
    return {f"{rng.choice(STRINGS)}{i}": random_value(rng, depth - 1) for i in range(size)}


def written(rng: random.Random, value: Any) -> bytes:
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")])
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=separators)
    return (rng.choice(["", " ", "\n\n"]) + text + rng.choice(["", "  ", "\r\n"])).encode()


def outcome(read: Any, body: bytes) -> Any:
    try:
        return read(body)
    except ApiError as error:
        return error.status, error.code


@pytest.mark.parametrize("piece_bytes", [1, 40, 400])
def test_pieces_have_the_value_of_the_whole(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
    rng = random.Random(piece_bytes)
    for _ in range(300):
        value = {f"name {i}": random_value(rng, 3) for i in range(rng.randrange(5))}
        body = written(rng, value)
        found = parse_large_object(body, ANY)
        assert found == value
        assert json.dumps(found) == json.dumps(value)  # the types of numbers and the order of names, too


@pytest.mark.parametrize("piece_bytes", [1, 40])
def test_damaged_bodies_are_refused_by_both(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", piece_bytes)
    rng = random.Random(piece_bytes)
    num_refused = 0
    for _ in range(1500):
        body = bytearray(written(rng, {"a": random_value(rng, 3), "b": random_value(rng, 2)}))
        place = rng.randrange(len(body))
        change = rng.randrange(3)
        if change == 0:
            body[place] = rng.choice(b'"\\,:[]{}0 \n\x00\xff')
        elif change == 1:
            del body[place]
        else:
            body.insert(place, rng.choice(b'"\\,:[]{}0e.-'))
        whole, pieces = (outcome(read, bytes(body)) for read in (parse_object, lambda b: parse_large_object(b, ANY)))
        is_refused = isinstance(whole, tuple)
        num_refused += is_refused
        if is_refused and isinstance(pieces, tuple):
            assert pieces[0] == whole[0] == 400, bytes(body)
        else:
            assert pieces == whole, bytes(body)
    assert num_refused > 500


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        (b'{"a": [1, 2, 3,\n 4 5]}', "line 2 column 4", "invalid_json"),
        (b'{"a": "' + b"x" * 100 + b'\x01"}', "line 1 column 108", "invalid_json"),
        (b'{"a": [1, 2', "too early at line 1 column 12", "invalid_json"),
        (b'{"a": 1} {}', "line 1 column 10", "invalid_json"),
        (b'{"a": [1, 2,]}', "line 1 column", "invalid_json"),
        (b'{"a": 1, "b": "xxxxxxxxxx", "a": 2}', "'a' appears twice in one object", "invalid_json"),
        (b'{"a": "\xff", "b": 1}', "byte 0xff at offset 7", "invalid_encoding"),
        (b'{"a": ["\\ud83d"], "b": 1}', "a[0] contains half of a surrogate pair", "invalid_encoding"),
        (b'{"a": [1e999], "b": 1}', "a[0] is a number that is too large", "invalid_value"),
        (b'{"a": NaN, "b": "xxxxxxxxxxxxxx"}', "NaN is not a JSON value", "invalid_json"),
        (b"[1, 2, 3, 4, 5, 6, 7, 8]", "must be a JSON object, not an array", "invalid_type"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", f"deeper than {MAX_DEPTH} levels", "invalid_json"),
    ],
)
def test_what_is_wrong_is_said(body: bytes, words: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 1)
    with pytest.raises(ApiError) as caught:
        parse_large_object(body, ANY)
    assert words in str(caught.value)
    assert (caught.value.status, caught.value.code) == (400, code)


def models() -> list[type[BaseModel]]:
    """The models of all bodies that a route takes."""
    routes = [route for module in route_modules() for route in module.router.routes if isinstance(route, JsonRoute)]
    return list(dict.fromkeys(route._model for route in routes if route.body_field is not None))


def lists_of(limits: BodyLimits, path: Path = ()) -> Iterator[tuple[Path, BodyLimits, bool]]:
    """(path, limits, whether it is a list) of every list and mapping of a body, three levels deep."""
    for name in limits._names:
        inner = limits.inside(name)
        kinds = {form.get("type") for form in inner._forms}
        yield from (((*path, name), inner, kind == "array") for kind in ("array", "object") if kind in kinds)
        if len(path) < 3:
            yield from lists_of(inner, (*path, name))
            yield from lists_of(inner.inside(0), (*path, name, 0))


@pytest.mark.parametrize("model", models(), ids=lambda model: f"{model.__module__.split('.')[-2]}.{model.__name__}")
def test_every_list_and_mapping_has_a_limit(model: type[BaseModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every protocol: one item more is refused by its name before anything validates it."""
    monkeypatch.setattr(json_pieces, "MAX_CONTAINERS", 1 << 24)
    monkeypatch.setattr(json_pieces, "MAX_STRINGS", 1 << 24)
    limits = BodyLimits.of_model(model)
    for path, inner, is_list in lists_of(limits):
        most = inner.most_items(in_list=is_list)
        assert 1 <= most <= MAX_TOKEN_IDS, path
        if most > MAX_FREE_ITEMS:  # of integers
            continue
        value: Any = [0] * (most + 1) if is_list else {str(i): 0 for i in range(most + 1)}
        for key in reversed(path):
            value = [value] if isinstance(key, int) else {key: value}
        with pytest.raises(ApiError) as caught:
            parse_large_object(json.dumps(value).encode(), limits)
        assert f"has more than {most} items, the limit" in str(caught.value)
        assert caught.value.code == "array_above_max_length"
        assert str(caught.value.param).startswith(str(path[0]))


def test_limits_are_those_of_the_models() -> None:
    chat, completion = BodyLimits.of_model(ChatCompletionRequest), BodyLimits.of_model(CompletionRequest)
    assert chat.inside("messages").most_items(in_list=True) == 4096
    assert chat.inside("logit_bias").most_items(in_list=False) == 1024
    assert chat.inside("tools").most_items(in_list=True) == MAX_ITEMS
    parameters = chat.inside("tools").inside(0).inside("function").inside("parameters")
    assert parameters.most_items(in_list=False) == MAX_FREE_ITEMS
    assert completion.inside("prompt").most_items(in_list=True) == MAX_TOKEN_IDS
    assert completion.inside("prompt").inside(0).most_items(in_list=True) == MAX_TOKEN_IDS
    assert completion.inside("stop").most_items(in_list=True) == MAX_ITEMS


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([[[]] * 2000] * 20, "lists and objects"),
        ([["a"] * 20_000] * 7, "strings and names"),
        ([[1] * 30_000] * 80, "numbers"),
    ],
)
def test_the_values_of_a_whole_body_are_counted(value: Any, kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_large_object(json.dumps({"a": {"b": value}}).encode(), ANY)
    assert kind in str(caught.value)
    assert caught.value.code == "request_too_large"
