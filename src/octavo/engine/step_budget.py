"""Limits the prompt tokens of a step so that no stream stalls, based on the times of earlier steps.

A short prompt may make streams wait so that its first token comes soon, in its own step or as a larger part of one of
their steps. Even so, no stream falls more than ten tokens behind its pace, counted from its first token, and none waits
longer than a second. (The first limit leaves out the few prompt tokens that any step computes.) The pace is one
token every max_itl. If three steps with the streams alone take longer than that, the pace is one token every three such
steps; otherwise a new request would wait until many streams are done. With a long prompt no gap is longer than max_itl.
"""

from __future__ import annotations

from octavo.engine.step_times import StepTimes

# A chunk this small always fits: a prompt must progress, and steps of few tokens hardly differ in time.
MIN_PREFILL_TOKENS = 16
# The time of a step if no stream waits, and how long streams wait for short prompts; new requests and aborts wait
# for its end.
QUIET_STEP_S = 1.0
# How far streams may fall behind their pace. With less, the last of several short prompts that arrive together wait
# most of a second; more gains nothing with eight users.
MAX_TOKENS_BEHIND = 10
# The longest pace, in steps of streams alone. With two, streams never caught up after prompts that arrive together.
_STEPS_PER_TOKEN = 3

_FIRST_GUESS_TOKENS = 32
_LEAST_ENCODER_S = 0.005  # even if steps alone take all of max_itl
_AIM = 0.9  # share of the limit to aim at, because step times scatter


class StepBudget:
    """Limits the prompt tokens of steps.

    max_itl_s: seconds between two tokens of a stream, above 0.
    times: the times of the steps so far; `observe` adds to them.
    num_rows: in all methods, the rows of a step with the streams alone, one for each next token and each draft.
    """

    def __init__(self, max_itl_s: float, times: StepTimes) -> None:
        self._max_itl_s = max_itl_s
        self.times = times
        # How much later tokens may come before a stream is too far behind, and how long streams have waited already.
        self._slack_s = MAX_TOKENS_BEHIND * max_itl_s
        self._skipped_s = 0.0

    def lets_in(self, num_rows: int) -> bool:
        """True if prompt tokens may be computed while there are streams.

        False while the time of a step with about num_rows rows alone is unknown; the next step measures it.
        """
        return not num_rows or self.times.knows(num_rows)

    def max_prefill_tokens(self, num_rows: int, context: int, missing: int, to_compute: int) -> int:
        """Return the number of prompt tokens that may be computed together with the streams.

        context: number of tokens before these prompt tokens.
        missing: remaining tokens of the first prompt if streams may wait for it, otherwise 0.
        to_compute: number of tokens that the first prompt had to compute when it began.
        """
        per_token = self.times.chunk_token_s(context)
        if per_token is None:
            return MIN_PREFILL_TOKENS if num_rows else _FIRST_GUESS_TOKENS
        if not num_rows:
            return max(int(max(self._max_itl_s, QUIET_STEP_S) / per_token), MIN_PREFILL_TOKENS)
        room_s = self._room_beside(num_rows)
        if to_compute * per_token <= QUIET_STEP_S:
            longest_s = QUIET_STEP_S - self._skipped_s - self._decode_time(num_rows)
            room_s = max(room_s, min(room_s + self._slack_s, missing * per_token, longest_s))
        return max(round(room_s / per_token), MIN_PREFILL_TOKENS)

    def encoder_s(self, num_rows: int) -> float:
        """Return how many seconds an image encoder may run before the streams take their next step.

        num_rows: 0 without streams.
        """
        if not num_rows:
            return QUIET_STEP_S
        return max(self._room_beside(num_rows), _LEAST_ENCODER_S)

    def lets_skip(self, num_rows: int, num_tokens: int) -> bool:
        """True if the streams should wait for a step that computes only a whole prompt of num_tokens tokens.

        A prompt that takes less time than one of their steps does not gain enough from a step of its own.
        """
        per_token = self.times.chunk_token_s(0)
        if per_token is None or num_tokens * per_token < self._decode_time(num_rows):
            return False
        slack_s = min(max(self._room_beside(num_rows), 0.0) + self._slack_s, QUIET_STEP_S - self._skipped_s)
        return num_tokens * per_token <= slack_s

    def observe(
        self,
        num_rows: int,
        num_prefill_tokens: int,
        context: int,
        elapsed_s: float,
        *,
        skips_decodes: bool = False,
    ) -> None:
        """Record the time of a step.

        context: tokens before the first of the prompt tokens, if there are any.
        skips_decodes: whether streams waited for it.
        """
        pace_s = self._pace(num_rows)
        most_slack_s = MAX_TOKENS_BEHIND * pace_s
        if num_rows:
            self._slack_s = min(max(self._slack_s - elapsed_s + pace_s, 0.0), most_slack_s)
        elif skips_decodes:
            self._slack_s = max(self._slack_s - elapsed_s, 0.0)
        else:
            self._slack_s = most_slack_s
        self._skipped_s = self._skipped_s + elapsed_s if skips_decodes else 0.0
        self.times.observe(num_rows, num_prefill_tokens, context, elapsed_s)

    def _pace(self, num_rows: int) -> float:
        """Return the seconds per token to which a stream may slow down in the long run."""
        return max(self._max_itl_s, _STEPS_PER_TOKEN * self._decode_time(num_rows))

    def _room_beside(self, num_rows: int) -> float:
        """Return the part of max_itl, in seconds, that a step with only the streams leaves unused.

        It is negative if such a step takes longer.
        """
        return self._max_itl_s * _AIM - self._decode_time(num_rows)

    def _decode_time(self, num_rows: int) -> float:
        return self.times.step_s(num_rows) or 0.0
