"""Places the images of a request at their positions in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from octavo.engine.texts.placing import Placed, place_items
from octavo.errors import ModelLoadError, UsageError
from octavo.prompt import Prompt
from octavo.server.models.image_reader import image_processor
from octavo.server.models.served_model import ServedModel


class PlacedImages:
    """The images of a request, for placing them in prompts.

    images: items or layouts, in the order of their marks. A layout only adds the right number of tokens to a prompt.
    """

    def __init__(self, model: ServedModel, images: Sequence[Placed]) -> None:
        self._model = model
        self._images = images

    def place(self, token_ids: Sequence[int], numbers: Sequence[int]) -> Prompt:
        """Return the prompt in which the i-th placeholder is the image with number `numbers[i]`.

        Raises UsageError if the numbers of placeholders and images differ.
        """
        if not numbers:
            return Prompt(token_ids)
        return place_items(token_ids, [self._images[i] for i in numbers], self._placeholder_id, self._encode)

    def place_in_text(self, text: str, marker: str, numbers: Sequence[int]) -> Prompt:
        """Return the prompt for a text in which each marker is replaced by the next of these images.

        Raises UsageError if the text contains the model's own placeholder.
        """
        settings = self._model.info.images
        assert settings is not None
        before, after = image_processor(settings).wrapping
        pieces = text.split(marker) if numbers else [text]
        token_ids = [*self._model.tokenizer.prefix_ids]
        for i, piece in enumerate(pieces):
            is_last = i == len(pieces) - 1
            encoded = self._encode(f"{after if i else ''}{piece}{'' if is_last else before}")
            if self._placeholder_id in encoded:
                raise UsageError(
                    f"the prompt contains the image token {image_processor(settings).placeholder}; write the "
                    "media_marker of /props instead",
                    param="prompt",
                    code="invalid_value",
                )
            token_ids += encoded if is_last else [*encoded, self._placeholder_id]
        return self.place(token_ids, numbers)

    def _encode(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    @cached_property
    def _placeholder_id(self) -> int:
        settings = self._model.info.images
        assert settings is not None
        placeholder = image_processor(settings).placeholder
        token_ids = self._encode(placeholder)
        if len(token_ids) != 1:
            raise ModelLoadError(f"the tokenizer of {self._model.name} has no token {placeholder} for images")
        return token_ids[0]
