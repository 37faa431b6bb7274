"""The typed and checked settings of an image processor, from config.json and preprocessor_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

from octavo.errors import ModelLoadError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1  # numbers of Pillow's filters

VIDEO_FILE = "video_preprocessor_config.json"

_MAX_SIDE, _MAX_PIXELS = 1 << 16, 1 << 28

Triple: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class ImageSettings:
    """The settings of an image processor. Its methods raise ModelLoadError naming file, key and value.

    config: content of config.json, which may lack any key
    preprocessor: content of preprocessor_config.json, which may lack any key
    file: name of the preprocessor's file, for errors
    """

    model_type: str
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    file: str = "preprocessor_config.json"

    @property
    def canonical_text(self) -> str:
        """A text that is the same for equal settings. It is part of the digest of an image's content."""
        vision = self.config.get("vision_config") or {}
        values = [self.model_type, vision, self.preprocessor]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)

    def changed(self, **values: object) -> ImageSettings:
        """Return the same settings with other preprocessor values."""
        return replace(self, preprocessor={**self.preprocessor, **values})

    def of_videos(self) -> ImageSettings:
        """Return the settings for videos, from video_preprocessor_config.json, in place of those for images."""
        stored = self.preprocessor.get("video") or {}
        if not isinstance(stored, Mapping):
            raise ModelLoadError(f"the settings of videos are {stored!r:.80}; they must be an object")
        return replace(self, preprocessor=stored, file=VIDEO_FILE)

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raise ModelLoadError about a preprocessor value."""
        raise ModelLoadError(f"{self.file}: {key} is {self.preprocessor.get(key)!r:.80}: {reason}")

    def vision(self, key: str, default: int, most: int = _MAX_SIDE) -> int:
        """Return a positive integer from `vision_config`. A list of equal numbers is read as one number."""
        stored = (self.config.get("vision_config") or {}).get(key)
        if isinstance(stored, list) and len(set(map(str, stored))) == 1:
            stored = stored[0]
        return _integer(f"config.json: vision_config.{key}", stored, default, most)

    def side(self, key: str, default: int) -> int:
        """Return a length in pixels or patches from the preprocessor."""
        return _integer(f"{self.file}: {key}", self.preprocessor.get(key), default, _MAX_SIDE)

    def count(self, key: str, default: int, most: int = _MAX_PIXELS) -> int:
        """Return a positive integer from the preprocessor."""
        return _integer(f"{self.file}: {key}", self.preprocessor.get(key), default, most)

    def text_count(self, key: str, default: int) -> int:
        """Return a positive integer from config.json itself."""
        return _integer(f"config.json: {key}", self.config.get(key), default, _MAX_PIXELS)

    def size(self, key: str, defaults: Mapping[str, int], most: int = _MAX_SIDE) -> dict[str, int]:
        """Return the positive integers of a size such as {"height": 896, "width": 896}. A single number stands for all
        of them.
        """
        stored = self.preprocessor.get(key)
        if stored is None:
            return dict(defaults)
        if isinstance(stored, int):
            stored = dict.fromkeys(defaults, stored)
        if not isinstance(stored, Mapping):
            raise ModelLoadError(f"{self.file}: {key} is {stored!r:.80}; it must be a size")
        sides = {name: value for name, value in stored.items() if value is not None}
        return {
            name: _integer(f"{self.file}: {key}.{name}", sides.get(name), default, most)
            for name, default in defaults.items()
        }

    def number(self, key: str, default: float) -> float:
        """Return a finite number from the preprocessor."""
        stored = self.preprocessor.get(key)
        return default if stored is None else self._number(key, stored)

    def flag(self, key: str, default: bool) -> bool:
        stored = self.preprocessor.get(key)
        if stored is None:
            return default
        if not isinstance(stored, bool):
            raise ModelLoadError(f"{self.file}: {key} is {stored!r:.80}; it must be true or false")
        return stored

    def resample(self, default: int) -> int:
        """Return Pillow's number for the filter."""
        stored = self.preprocessor.get("resample")
        if stored is None:
            return default
        if not isinstance(stored, int) or isinstance(stored, bool) or not 0 <= stored <= 5:
            raise ModelLoadError(f"{self.file}: resample is {stored!r:.80}; Pillow's filters are 0 to 5")
        return stored

    def statistics(self, mean: Triple, std: Triple) -> tuple[float, Triple | None, Triple | None]:
        """Return the factor for pixels, and the mean and standard deviation of the three colours, or None if they are
        not normalized.
        """
        if not self.flag("do_rescale", True) or not self.flag("do_resize", True):
            raise ModelLoadError("preprocessor_config.json: do_rescale and do_resize must be true")
        factor = self.number("rescale_factor", 1 / 255)
        if not self.flag("do_normalize", True):
            return factor, None, None
        return factor, self._triple("image_mean", mean), self._triple("image_std", std, may_be_zero=False)

    def _number(self, key: str, stored: object) -> float:
        if isinstance(stored, bool) or not isinstance(stored, int | float) or not math.isfinite(stored):
            raise ModelLoadError(f"{self.file}: {key} is {stored!r:.80}; it must be a number")
        return float(stored)

    def _triple(self, key: str, default: Triple, may_be_zero: bool = True) -> Triple:
        stored = self.preprocessor.get(key)
        if stored is None:
            return default
        values = [stored] * 3 if isinstance(stored, int | float) else stored
        if not isinstance(values, list | tuple) or len(values) != 3:
            raise ModelLoadError(f"{self.file}: {key} is {stored!r:.80}; it must have three numbers")
        first, second, third = (self._number(key, value) for value in values)
        if not may_be_zero and 0 in (first, second, third):
            raise ModelLoadError(f"{self.file}: {key} is {stored!r:.80}, but it is a divisor and must not be 0")
        return first, second, third


def _integer(place: str, stored: object, default: int, most: int) -> int:
    if stored is None:
        return default
    if isinstance(stored, bool) or not isinstance(stored, int) or not 1 <= stored <= most:
        raise ModelLoadError(f"{place} is {stored!r:.80}; it must be an integer from 1 to {most}")
    return stored
