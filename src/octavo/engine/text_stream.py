"""The text of a growing sequence: whole characters only, stop strings held back."""

from __future__ import annotations

from octavo.sampling_params import SamplingParams
from octavo.tokenizer.detokenizer import Detokenizer
from octavo.tokenizer.stop_strings import StopStrings
from octavo.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Turns tokens into text. `take` returns each character once; all of them together are `text`."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        # A model may have more rows of logits than the tokenizer has tokens; those have no text.
        self._num_tokens = tokenizer.vocab_size
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_strings = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_taken = 0
        self.num_tokens_pushed = 0
        self.watches_text = bool(params.stop_strings)

    @property
    def text(self) -> str:
        """All text so far that cannot become part of a stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: list[int], may_stop: bool = True) -> str | None:
        """Adds the next tokens; returns the stop string that they complete, if any."""
        self.num_tokens_pushed += len(token_ids)
        piece = self._detokenizer.push([token_id for token_id in token_ids if token_id < self._num_tokens])
        self._pieces.append(self._stop_strings.push(piece) if may_stop else piece)
        return self._stop_strings.stopped

    def flush(self) -> None:
        """Ends the text, including incomplete characters and text held back for stop strings."""
        if self._stop_strings.stopped is None:
            self._pieces.append(self._stop_strings.push(self._detokenizer.flush()))
        self._pieces.append(self._stop_strings.flush())

    def take(self) -> str:
        """The text since the last call."""
        text = self.text
        new, self._num_taken = text[self._num_taken :], len(text)
        return new
