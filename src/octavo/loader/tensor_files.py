"""The mapped files of a model: the place of each tensor, its bytes, and its pages released again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile, identity_of


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The type, shape and place of a tensor."""

    name: str
    type_name: str  # as the format writes it: `F32`, `Q4_K`, `F8_E4M3`
    shape: tuple[int, ...]  # as numpy writes it: [out_features, in_features]
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int


class TensorFiles:
    """The common part of the file formats. tensors: by the names in the files."""

    def __init__(self, files: Mapping[Path, MappedFile], tensors: Mapping[str, TensorInfo]) -> None:
        self._files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))

    def array(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, not copied. Raises ModelLoadError if there is none, or if the file has changed."""
        info = self._info(name)
        return self._files[info.file].array(info.offset, info.nbytes)

    def sample(self, name: str) -> bytes:
        """At most a page from the middle of this tensor."""
        info = self._info(name)
        return self._files[info.file].sample(info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Lets the system reclaim the pages of this tensor, for example once a backend has packed it."""
        info = self._info(name)
        self._files[info.file].release(info.offset, info.nbytes)

    def identity(self) -> str | None:
        """A text that changes whenever the content may have changed; None while the files are too new to tell."""
        return identity_of(self._files.values())

    def close(self) -> None:
        """Closes the files. Weights that are still alive keep theirs mapped. May be called twice."""
        for file in self._files.values():
            file.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelLoadError(f"{next(iter(self._files))}: there is no tensor {name!r:.80}")
        return self.tensors[name]
