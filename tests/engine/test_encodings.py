"""The encoder beside streams, with an encoder that is none: its turns, its parts, and what is dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from octavo.batch import Float32
from octavo.engine.encoding.encodings import Encodings
from octavo.engine.encoding.image_encoder import ImageEncoder
from octavo.engine.encoding.rotary import rotary_positions
from octavo.engine.engine import Engine
from octavo.engine.limits import ImageLimits
from octavo.engine.step_budget import QUIET_STEP_S, StepBudget
from octavo.engine.step_times import StepTimes
from octavo.errors import UsageError
from octavo.image_layout import ImageLayout, ImageTile
from octavo.prompt import MAX_VALUES_BYTES, MediaItem, Prompt, Span
from octavo.sampling_params import SamplingParams
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine

WIDTH = 3
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class SlowEncoder:
    """Needs `parts` calls for a step; notes the items and the seconds of each."""

    max_inputs = 16
    processor = None

    def __init__(self, parts: int = 1) -> None:
        self.parts, self.left = parts, 0
        self.items: tuple[MediaItem, ...] = ()
        self.begun: list[list[bytes]] = []
        self.seconds: list[float | None] = []

    def begin(self, items: list[MediaItem]) -> None:
        self.items, self.left = tuple(items), self.parts
        self.begun.append([item.key for item in items])

    def run(self, seconds: float | None) -> list[tuple[MediaItem, Float32]]:
        self.seconds.append(seconds)
        self.left -= 1
        if self.left:
            return []
        found = [(item, np.full((item.num_rows, WIDTH), item.key[0], np.float32)) for item in self.items]
        self.items = ()
        return found

    def close(self) -> None:
        pass


def item(key: bytes, rows: int = 1, cols: int = 2) -> MediaItem:
    layout = ImageLayout(cols, rows, (ImageTile(2 * rows, 2 * cols, rows * cols),), (rows * cols,))
    return MediaItem(key, layout, (np.zeros((2 * rows, 2 * cols, 3), np.uint8),))


def with_image(head: list[int], image: MediaItem, tail: list[int]) -> Prompt:
    ids = [*head, *[0] * image.num_rows, *tail]
    return Prompt(ids, [Span(len(head), image.num_rows, image.key, item=image)])


def engine_of(encoder: SlowEncoder, max_bytes: int = 1 << 20, num_stages: int = 1, **limits: int) -> Engine:
    executor = FakeExecutor(num_stages=num_stages)
    executor.span_width = WIDTH
    engine = fake_engine(executor=executor, **limits)  # type: ignore[arg-type]
    engine._factory._limits = engine.limits = _seeing(engine.limits)
    engine.see(Encodings(cast(ImageEncoder, encoder), max_bytes))
    return engine


def _seeing(limits: Any) -> Any:
    return replace(limits, images=ImageLimits(16, 1, 2, 1))


def run(engine: Engine) -> dict[str, list[int]]:
    """The tokens of all requests."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            for choice in output.outputs:  # type: ignore[union-attr]
                found.setdefault(output.request_id, []).extend(choice.token_ids)
    return found


def test_a_stream_gets_a_token_between_the_parts_of_an_encoder() -> None:
    encoder = SlowEncoder(parts=4)
    engine = engine_of(encoder)
    engine.scheduler.step_budget = StepBudget(0.2, engine.scheduler.times)
    engine.add_request(create_request(engine, "stream", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True)))
    while not any(output.outputs for output in engine.step()):  # type: ignore[union-attr]
        pass
    engine.add_request(create_request(engine, "image", with_image([5, 6], item(b"a"), [7]), PARAMS))
    tokens = 0
    rounds: list[int] = []
    while rounds[-1:] != [4]:
        before = len(encoder.seconds)
        outputs = engine.step()
        tokens += sum(len(choice.token_ids) for output in outputs for choice in output.outputs)  # type: ignore[union-attr]
        assert len(encoder.seconds) - before <= 1
        rounds.append(len(encoder.seconds))
    assert tokens >= len(rounds) - 1 > 4  # one in every round, and rounds without the encoder
    assert all(0 < seconds <= 0.2 for seconds in encoder.seconds if seconds is not None)
    answers = run(engine)
    assert len(answers["image"]) == PARAMS.max_tokens


def test_without_streams_the_encoder_runs_for_longer() -> None:
    budget = StepBudget(0.2, StepTimes())
    assert budget.encoder_s(0) == QUIET_STEP_S
    assert budget.encoder_s(1) < 0.2
    budget.times.observe(1, 0, 0, 5.0)
    assert 0 < budget.encoder_s(1) < 0.01


def test_text_before_an_image_is_computed_meanwhile() -> None:
    encoder = SlowEncoder(parts=3)
    engine = engine_of(encoder)
    request = create_request(engine, "a", with_image([5, 6, 7], item(b"a"), [8]), PARAMS)
    engine.add_request(request)
    engine.step()
    assert request.sequences[0].num_computed_tokens == 3
    assert encoder.begun == []  # it begins before the next step
    engine.step()
    assert encoder.begun == [[b"a"]]
    assert len(run(engine)["a"]) == PARAMS.max_tokens


def test_images_share_a_step_as_far_as_it_has_room() -> None:
    encoder = SlowEncoder()
    engine = engine_of(encoder)
    for i, key in enumerate((b"a", b"b", b"a", b"c")):  # of 8 patches; two fit
        engine.add_request(create_request(engine, str(i), with_image([5 + i], item(key), [9]), PARAMS))
    answers = run(engine)
    assert encoder.begun == [[b"a", b"b"], [b"c"]]
    assert {len(tokens) for tokens in answers.values()} == {PARAMS.max_tokens}


def test_an_image_that_nobody_wants_any_more_is_dropped() -> None:
    encoder = SlowEncoder(parts=100)
    engine = engine_of(encoder)
    engine.add_request(create_request(engine, "a", with_image([5], item(b"a"), [8]), PARAMS))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    encoder.parts = 1
    engine.add_request(create_request(engine, "b", with_image([5], item(b"b"), [8]), PARAMS))
    assert len(run(engine)["b"]) == PARAMS.max_tokens
    assert encoder.begun == [[b"a"], [b"b"]]


def test_streams_do_not_wait_for_an_image_that_nobody_wants_any_more() -> None:
    encoder = SlowEncoder(parts=100)
    engine = engine_of(encoder)
    engine.add_request(create_request(engine, "a", with_image([5], item(b"a"), [8]), PARAMS))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    num_runs = len(encoder.seconds)
    engine.add_request(create_request(engine, "text", [5, 6], PARAMS))
    assert len(run(engine)["text"]) == PARAMS.max_tokens
    assert len(encoder.seconds) == num_runs > 0


def test_the_stages_of_a_pipeline_run_empty_before_the_encoder_runs() -> None:
    """Streams in all stages end long after the image has its rows."""
    encoder = SlowEncoder(parts=3)
    engine = engine_of(encoder, num_stages=2)
    run_part = encoder.run

    def checked(seconds: float | None) -> list[tuple[MediaItem, Float32]]:
        assert not engine._in_flight
        return run_part(seconds)

    encoder.run = checked  # type: ignore[method-assign]
    for i in range(2):
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        engine.add_request(create_request(engine, f"stream {i}", [5, 6, i], params))
    for _ in range(4):
        engine.step()
    assert len(engine._in_flight) == 1  # beside the step that has ended
    engine.add_request(create_request(engine, "image", with_image([5], item(b"a"), [8]), PARAMS))
    ended: list[str] = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if getattr(output, "finished", False)]
    assert ended[0] == "image"
    assert len(ended) == 3


def test_a_prompt_that_ends_with_an_image_waits_for_its_rows() -> None:
    """Its last position alone looks like a decode."""
    encoder = SlowEncoder(parts=2)
    engine = engine_of(encoder)
    image = item(b"a", 1, 1)
    engine.add_request(create_request(engine, "a", with_image([5, 6], image, []), PARAMS))
    assert len(run(engine)["a"]) == PARAMS.max_tokens
    assert encoder.begun == [[b"a"]]


def test_rows_that_were_not_used_for_long_are_dropped() -> None:
    encoder = SlowEncoder()
    engine = engine_of(encoder, max_bytes=2 * 2 * WIDTH * 4, enable_prefix_caching=False)
    for name in ("a", "b", "a", "c", "a", "b"):
        engine.add_request(create_request(engine, name, with_image([5], item(name.encode()), [8]), PARAMS))
        run(engine)
    assert encoder.begun == [[b"a"], [b"b"], [b"c"], [b"b"]]
    assert engine.encodings is not None
    assert engine.encodings.num_bytes == 2 * 2 * WIDTH * 4


def test_positions_of_text_beside_images() -> None:
    """As in the paper's figure: an image of 2 x 3 at position 2, text from 5 on, and a second image there."""
    images = item(b"a", 2, 3), item(b"b", 1, 2)
    ids = [5, 6, *[0] * 6, 7, *[0] * 2, 8]
    prompt = Prompt(ids, [Span(2, 6, b"a", item=images[0]), Span(9, 2, b"b", item=images[1])])
    found = rotary_positions(prompt, 2)
    assert found is not None
    assert found.prompt.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert found.of(10, 14).tolist() == [[6, 8, 9, 10], [6, 8, 9, 10], [7, 8, 9, 10]]
    assert found.of(12, 13).tolist() == [[9]] * 3
    assert rotary_positions(Prompt([1, 2]), 2) is None


def test_items_are_checked() -> None:
    good = item(b"a")
    with pytest.raises(UsageError, match="key of an item"):
        MediaItem(b"", good.layout, good.tiles)
    with pytest.raises(UsageError, match="2 tiles, but its layout has 1"):
        MediaItem(b"a", good.layout, good.tiles * 2)
    with pytest.raises(UsageError, match="a tile is float32"):
        MediaItem(b"a", good.layout, (good.tiles[0].astype(np.float32),))
    with pytest.raises(UsageError, match="rows from 1 on of an item with 2"):
        Span(0, 2, b"a", item=good, offset=1)
    huge = np.broadcast_to(np.zeros(3, np.uint8), (1 << 12, 1 + MAX_VALUES_BYTES // (3 << 12), 3))
    with pytest.raises(UsageError, match="the pixels of the images, take"):
        Prompt([0, 0], [Span(0, 2, b"a", item=MediaItem(b"a", good.layout, (huge,)))])
