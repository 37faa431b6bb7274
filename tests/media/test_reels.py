"""Documents and videos in the process without rights: their pages and frames, and hostile files."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from octavo.errors import ModelLoadError, UsageError
from octavo.media import decoding, pages, picture_worker
from octavo.media.decoding import PictureDecoder
from octavo.media.pixels import resized
from octavo.media.processor import read_processor
from octavo.media.reels import FileKind, VideoHeader, kind_of
from tests.support.pictures import files, noise
from tests.support.videos import encoded_document, encoded_video, frames, text_document, turned_video

pytest.importorskip("av", reason="PyAV is not installed")
pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

PROCESSOR = read_processor("qwen3_vl", {}, {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}})
DOCUMENT = encoded_document([noise(100, 60, seed).convert("RGB") for seed in range(3)])
VIDEO = encoded_video(frames(12, 48, 64), 6)
FILM = encoded_video(frames(12, 48, 64), 6, "mp4", "mpeg4")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """transformers' module, which can be imported in its usual way only beside torchvision."""
    name = "transformers.models.qwen3_vl.video_processing_qwen3_vl"
    path = Path(transformers.__file__).parent / "models/qwen3_vl/video_processing_qwen3_vl.py"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    made = PictureDecoder(num_processes=1)
    yield made
    made.close()


def test_kinds_are_known_by_their_first_bytes() -> None:
    assert {kind_of(data) for data in files().values()} == {"image"}
    assert kind_of(b"\0\0\0\x18ftypheic" + bytes(20)) == "image"  # a photo of a phone, which cannot be read
    assert kind_of(b"\xff\xd8\xff\xe0\0\x10JFIF\0 %PDF-1.4" + bytes(20)) == "image"
    assert kind_of(DOCUMENT) == kind_of(b"\n" * 100 + DOCUMENT) == "document"
    for kind in ("matroska", "mp4", "avi", "mov"):
        assert kind_of(encoded_video(frames(2, 16, 16), 1, kind, "mpeg4")) == "video"


def test_pages_become_pictures(decoder: PictureDecoder) -> None:
    measured = decoder.reel(DOCUMENT, "document", PROCESSOR)
    reel, shots = decoder.shots(DOCUMENT, "document", PROCESSOR)
    assert measured == reel
    assert [(layout.width, layout.height) for layout in reel.layouts] == [(200, 120)] * 3
    assert reel.texts == ("", *["<|vision_end|><|vision_start|>"] * 2)
    for seed, (tile,) in enumerate(shots):
        page = noise(100, 60, seed).convert("RGB").resize((tile.shape[1], tile.shape[0]), Image.Resampling.BILINEAR)
        likeness = np.corrcoef(np.asarray(page).reshape(-1), tile.reshape(-1))[0, 1]
        assert likeness > 0.8  # JPEG in between


def test_large_pages_are_made_smaller(decoder: PictureDecoder) -> None:
    (layout,) = decoder.reel(encoded_document([Image.new("RGB", (3000, 1500))]), "document", PROCESSOR).layouts
    assert (layout.width, layout.height) == (2048, 1024)


def test_frames_are_those_of_the_file(decoder: PictureDecoder) -> None:
    """FFV1 keeps all pixels."""
    reel, shots = decoder.shots(VIDEO, "video", PROCESSOR)
    assert reel == decoder.reel(VIDEO, "video", PROCESSOR) == PROCESSOR.reel(VideoHeader(64, 48, 12, 6.0))
    assert reel.frames == ((0, 4), (7, 11))
    pixels = frames(12, 48, 64)
    for (tile,), group in zip(shots, reel.frames, strict=True):
        height = tile.shape[0] // 2
        wanted = [resized(pixels[number], tile.shape[1], height, PROCESSOR.resample) for number in group]
        assert tile.tobytes() == np.concatenate(wanted).tobytes()


@pytest.mark.parametrize(("count", "rate"), [(1, 25.0), (3, 30.0), (50, 10.0), (299, 29.97), (4000, 24.0), (90, 1.0)])
def test_frames_and_times_are_those_of_transformers(count: int, rate: float, judge: ModuleType) -> None:
    settings = {"size": {"shortest_edge": 4096, "longest_edge": 6 << 20}}
    processor = read_processor("qwen3_vl", {}, {"video": settings})
    for width, height in ((640, 360), (41, 23), (360, 640)):
        reel = processor.reel(VideoHeader(width, height, count, rate))
        metadata = VideoMetadata(total_num_frames=count, fps=rate)
        rule = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
        indices = judge.Qwen3VLVideoProcessor.sample_frames(rule, metadata)
        times = Qwen3VLProcessor._calculate_timestamps(None, indices, rate, 2)
        assert sorted({number for group in reel.frames for number in group}) == sorted(set(indices.tolist()))
        texts = [text.removeprefix("<|vision_end|>").removesuffix("<|vision_start|>") for text in reel.texts]
        assert texts == [f"<{time:.1f} seconds>" for time in times]
        sides = {(16 * layout.tiles[0].grid_rows, 16 * layout.tiles[0].grid_cols) for layout in reel.layouts}
        wanted = judge.smart_resize(max(len(indices), 2), height, width, 2, 32, 4096, 6 << 20)
        assert sides == {wanted}


def test_a_video_has_no_more_pixels_than_a_prompt_can_have() -> None:
    processor = read_processor("qwen3_vl", {}, {})
    reel = processor.reel(VideoHeader(1920, 1080, 7200, 24.0))
    assert sum(2 * 256 * layout.tiles[0].grid_rows * layout.tiles[0].grid_cols for layout in reel.layouts) <= 15 << 20
    small = processor.limited(64).reel(VideoHeader(1920, 1080, 240, 24.0))
    assert all(layout.num_tokens <= 64 for layout in small.layouts)
    assert small.num_tokens <= 4 * 64


def test_turned_videos_are_shown_upright(decoder: PictureDecoder) -> None:
    reel, shots = decoder.shots(turned_video(frames(12, 48, 64), 6), "video", PROCESSOR)
    straight = decoder.shots(FILM, "video", PROCESSOR)[1]
    assert {(layout.width, layout.height) for layout in reel.layouts} == {(48, 64)}
    for (tile,), (other,) in zip(shots, straight, strict=True):
        (first, _), (right, _) = np.split(tile, 2), np.split(other, 2)
        turned = np.rot90(right, -1).astype(int)
        assert first.shape == turned.shape
        assert np.abs(first - turned).mean() < 4  # resized after it was turned
        assert np.abs(first - turned[::-1, ::-1]).mean() > 20


def test_narrow_videos_are_refused_if_they_cannot_be_made_small_enough() -> None:
    processor = read_processor("qwen3_vl", {}, {}).limited(64)
    with pytest.raises(UsageError, match="is 3000 x 30 pixels: 750 frames that narrow have too many pixels") as error:
        processor.reel(VideoHeader(3000, 30, 9000, 24.0))
    assert error.value.code == "image_too_narrow"
    reel = processor.reel(VideoHeader(3000, 140, 48, 24.0))  # more than 20 to 1
    assert all(layout.num_tokens <= 64 for layout in reel.layouts)


def test_settings_of_videos_are_named_with_their_file() -> None:
    for values, problem in (
        ({"fps": 0}, "fps is 0: it must be the number of frames per second"),
        ({"fps": "2"}, "fps is '2'; it must be a number"),
        ({"min_frames": 0}, "min_frames is 0; it must be an integer from 1"),
        ({"size": {"longest_edge": -1}}, "size.longest_edge is -1"),
    ):
        with pytest.raises(ModelLoadError, match=rf"^video_preprocessor_config\.json: {problem}"):
            read_processor("qwen3_vl", {}, {"video": values})
    with pytest.raises(ModelLoadError, match=r"^preprocessor_config\.json: merge_size is 0"):
        read_processor("qwen3_vl", {}, {"merge_size": 0})


def test_the_text_layer_of_a_document(decoder: PictureDecoder) -> None:
    assert decoder.text(text_document("One page.", "", "Third.")) == "One page.\n\nThird."
    with pytest.raises(UsageError, match="has no text, only pictures of its pages: use a vision model") as error:
        decoder.text(DOCUMENT)
    assert error.value.code == "invalid_document"
    with pytest.raises(UsageError, match="is damaged"):
        decoder.text(b"%PDF-1.7 nothing")


MANY = encoded_document([Image.new("1", (8, 8))] * (pages.MAX_PAGES + 1))


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (MANY, "document", "has 101 pages; 1 to 100 are allowed"),
        (b"%PDF-1.7 nothing", "document", "is damaged"),
        (DOCUMENT[: len(DOCUMENT) // 3], "document", "is damaged"),
        (FILM[: len(FILM) // 2], "video", "is damaged"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), "video", "is damaged"),
    ],
    ids=["pages", "no document", "half a document", "half a video", "no video"],
)
def test_hostile_files_are_refused(decoder: PictureDecoder, data: bytes, kind: FileKind, text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        decoder.shots(data, kind, PROCESSOR)
    assert error.value.code == f"invalid_{kind}"
    decoder.shots(DOCUMENT if kind == "document" else VIDEO, kind, PROCESSOR)  # the process still serves


def test_large_frames_and_slow_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = PictureDecoder(1000)
    with pytest.raises(UsageError, match="is 64 x 48 pixels, more than the 1,000 of --max-image-pixels"):
        small.reel(VIDEO, "video", PROCESSOR)
    monkeypatch.setattr(decoding, "MAX_REEL_SECONDS", 0.001)
    hasty = PictureDecoder()
    with pytest.raises(UsageError, match=r"takes more than 0\.001 s or too much memory"):
        hasty.shots(encoded_video(frames(4, 720, 1280), 2), "video", PROCESSOR)
    small.close()
    hasty.close()


@pytest.mark.parametrize(("kind", "module", "extra"), [("document", "pypdfium2", "pdf"), ("video", "av", "video")])
def test_the_extra_that_is_missing_is_named(
    kind: FileKind, module: str, extra: str, decoder: PictureDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "find_spec", lambda name: None if name == module else name)
    with pytest.raises(UsageError, match=rf"pip install 'octavo\[{extra}\]'"):
        decoder.reel(DOCUMENT, kind, PROCESSOR)


@pytest.mark.parametrize("kind", ["document", "video"])
def test_the_process_imports_all_it_needs_before_it_is_confined(kind: str) -> None:
    program = f"""
import sys
from octavo.media import picture_worker
from octavo.platform import limits
picture_worker._warm_up({kind!r})
limits.open_nothing()
try:
    open("/etc/passwd")
except OSError as error:
    print(error.errno)
print("av" in sys.modules, "pypdfium2" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["24", str(kind == "video"), str(kind == "document")]
    assert picture_worker.__doc__


def test_the_frames_before_the_first_one_shown_are_not_counted(decoder: PictureDecoder) -> None:
    """Lossless cuts keep frames that an edit list hides: the video has as many frames as a player shows."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=6, width=64, height=48, pix_fmt="yuv420p")
        packets = [p for each in frames(12, 48, 64) for p in stream.encode(av.VideoFrame.from_ndarray(each, "rgb24"))]
        for packet in [*packets, *stream.encode(None)]:
            packet.pts, packet.dts = packet.pts - 6, packet.dts - 6
            container.mux(packet)
    reel = decoder.reel(buffer.getvalue(), "video", PROCESSOR)
    assert [reel.frames[-1][-1], decoder.reel(FILM, "video", PROCESSOR).frames[-1][-1]] == [5, 11]
    assert len(decoder.shots(buffer.getvalue(), "video", PROCESSOR)[1]) == len(reel.layouts)
