"""Stop strings never leak, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tokenizer.stop_strings import StopStrings


def stream(text: str, stops: list[str], include: bool, portion: int) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include)
    pieces = [watcher.push(text[at : at + portion]) for at in range(0, len(text), portion)]
    if watcher.stopped is None:
        pieces.append(watcher.flush())
    return pieces, watcher.stopped


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition, tried at every length of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.integers(1, 7),
)
def test_as_defined(text: str, stops: list[str], include: bool, portion: int) -> None:
    pieces, stopped = stream(text, stops, include, portion)
    assert ("".join(pieces), stopped) == expected(text, stops, include)


def test_what_may_become_a_stop_is_held_back() -> None:
    watcher = StopStrings(["</s>"])
    assert watcher.push("a<") == "a"
    assert watcher.push("/s") == ""
    assert watcher.push("x") == "</sx"
    assert watcher.push("<") == ""
    assert watcher.flush() == "<"


def test_after_a_stop_nothing_comes() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("textENDmore") == "text"
    assert watcher.stopped == "END"
    assert watcher.push("more") == watcher.flush() == ""


def test_no_stops_let_everything_through() -> None:
    watcher = StopStrings([])
    assert watcher.push("abc") == "abc"
    assert watcher.stopped is None


def test_a_run_that_almost_matches_is_linear() -> None:
    """A search from each place again would take 10^10 steps."""
    watcher = StopStrings(["a" * 50_000 + "b"])
    pieces = [watcher.push("a" * 1000) for _ in range(200)]
    assert len("".join(pieces)) == 150_000
    assert len(watcher.flush()) == 50_000
