"""Images that a program gives beside a prompt: Pillow's, arrays, paths or the bytes of files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from octavo.engine.texts.placing import place_items
from octavo.errors import UsageError
from octavo.prompt import MediaItem, Prompt

if TYPE_CHECKING:
    from octavo.media.decoding import PictureDecoder
    from octavo.media.processor import ImageProcessor, Picture
    from octavo.tokenizer.tokenizer import Tokenizer

_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
IMAGE_KEYS = ("image", "image_pil", "image_url")  # each the type of a part of a message, and the key of its value
MAX_FILE_BYTES = 64 << 20


class ImageInputs:
    """Makes items of images, and prompts of token ids with them. Thread-safe. processor: None: the model reads text."""

    def __init__(self, tokenizer: Tokenizer, processor: ImageProcessor | None, model: str) -> None:
        """model: its name, for errors."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._model = model
        self._decoder = None if processor is None else _decoder()

    def prompt(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> Prompt:
        """The prompt in which each mark of an image is one of those given. given: as `split_images` returns it.

        Raises UsageError for images that cannot be read, or more or fewer than there are marks.
        """
        self.require()
        images, names = _checked(given)
        return self.place(token_ids, [self.item(image, name) for image, name in zip(images, names, strict=True)])

    def place(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Prompt:
        """The prompt in which each mark of an image is one of these items. Raises UsageError for another number."""
        return place_items(token_ids, items, self.placeholder_id(self.require()), self._encode)

    def require(self) -> ImageProcessor:
        """The processor. Raises UsageError if the model only reads text."""
        if self._processor is None:
            raise UsageError(
                f"the prompt has images, but {self._model} reads text only: leave out multi_modal_data, or load a "
                "model with its part that sees",
                param="multi_modal_data",
                code="unsupported_value",
            )
        return self._processor

    @property
    def mark(self) -> str:
        """The text that stands for an image in a raw prompt. Raises UsageError if the model only reads text."""
        processor = self.require()
        return processor.placeholder.join(processor.wrapping)

    def placeholder_id(self, processor: ImageProcessor) -> int:
        """The token that stands for an image. Raises UsageError if the vocabulary has no such token."""
        ids = self._tokenizer.encode(processor.placeholder, add_special_tokens=False, parse_special=True)
        if len(ids) != 1:
            raise UsageError(f"the vocabulary has no token {processor.placeholder!r}, which stands for an image")
        return ids[0]

    def item(self, image: Any, name: str | None = None) -> MediaItem:
        """An image as the engine takes it. name: the caller's for its content; None: a digest. Raises UsageError."""
        from octavo.media.digest import content_digest

        processor = self.require()
        data, picture = _read(image)
        key = content_digest("image" if name is None else "name", data if name is None else name.encode(), processor)
        if picture is None:
            assert self._decoder is not None, "a model that sees has one"
            try:
                layout, tiles = self._decoder.tiles(data, processor)
            except UsageError as error:
                raise UsageError(f"an image {error}", param="multi_modal_data", code=error.code) from None
            return MediaItem(key, layout, tiles)
        layout = processor.layout(picture.width, picture.height)
        return MediaItem(key, layout, processor.resize(picture, layout))

    def close(self) -> None:
        """Ends the processes that decode files. May be called twice."""
        if self._decoder is not None:
            self._decoder.close()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def _decoder() -> PictureDecoder:
    from octavo.media.decoding import PictureDecoder  # text does without

    return PictureDecoder()


def has_images(messages: object) -> bool:
    """True if a message has an image among the parts of its content."""
    if not isinstance(messages, (list, tuple)):
        return False
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_KEYS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )


def split_images(prompt: object) -> tuple[Any, Mapping[str, Any]]:
    """A prompt without what vLLM's keys say about images, and these with their values; none: an empty mapping."""
    if not isinstance(prompt, Mapping):
        return prompt, {}
    given = {key: prompt[key] for key in _KEYS if prompt.get(key)}
    return {key: value for key, value in prompt.items() if key not in _KEYS}, given


def _checked(given: Mapping[str, Any]) -> tuple[list[Any], list[str | None]]:
    """The images, and the names that the caller gives them."""
    if options := given.get("mm_processor_kwargs"):
        raise _wrong(
            f"mm_processor_kwargs has {next(iter(options))!r:.80}, which is not supported; image_max_tokens limits the "
            "size of all images",
            "mm_processor_kwargs",
        )
    data = given.get("multi_modal_data", {})
    if not isinstance(data, Mapping) or (unknown := [key for key in data if key != "image"]):
        found = f"{unknown[0]!r:.80}" if isinstance(data, Mapping) else f"{data!r:.80}"
        raise _wrong(f"multi_modal_data has {found}; it has images: {{'image': one or a list}}", "multi_modal_data")
    images = _listed(data.get("image"))
    names = _listed((given.get("multi_modal_uuids") or {}).get("image")) or [None] * len(images)
    if len(names) != len(images) or not all(name is None or (isinstance(name, str) and name) for name in names):
        raise _wrong(
            f"multi_modal_uuids names {names!r:.80}; it has a text for each image, or None", "multi_modal_uuids"
        )
    return images, names


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _read(image: Any) -> tuple[bytes, Picture | None]:
    """The bytes that name an image, and its pixels unless the bytes are a file with them."""
    from octavo.media.pictures import picture_of, picture_of_array

    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image), None
    if isinstance(image, (str, os.PathLike)):
        path = Path(cast("str | os.PathLike[str]", image)).expanduser()
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise _wrong(
                    f"{path} takes more than {MAX_FILE_BYTES >> 20} MiB, the most of an image", "multi_modal_data"
                )
            return path.read_bytes(), None
        except OSError as error:
            raise _wrong(f"{path}: {error.strerror or error}", "multi_modal_data") from None
    if isinstance(image, np.ndarray):
        picture = picture_of_array(image)
    elif hasattr(image, "getbands") and hasattr(image, "tobytes"):
        picture = picture_of(image)
    else:
        kinds = "a Pillow image, a numpy array of uint8, a path or bytes"
        raise _wrong(f"an image is {type(image).__name__}; it is {kinds}", "multi_modal_data")
    shape = f"pixels {picture.height} {picture.width} ".encode()
    return shape + picture.pixels.tobytes(), picture


def _wrong(problem: str, param: str) -> UsageError:
    return UsageError(problem, param=param, code="invalid_value")
