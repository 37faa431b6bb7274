"""The specification of every backend's sampler: the choice of a token from a row of logits.

The stages, in this order, all in float32 unless said otherwise:

0. The reported log-probabilities, ranks and most likely tokens are computed from the raw logits, unless
   `report_processed` replaces them. The order of likelihood is by descending logit, and by ascending id on ties.
1. `bias` is added (-inf forbids a token); tokens outside `allowed_mask` become -inf.
2. The repetition penalty applies to all seen tokens, including the prompt's: positive logits are divided by it,
   others are multiplied (CTRL, arXiv 1909.05858). Then, for generated tokens, `frequency_penalty * count` and
   `presence_penalty` are subtracted.
3. Temperature 0 takes the largest logit (the lowest id on ties), and sampling ends here. Otherwise
   `x = (logit - max) / temperature` and each token has the weight `exp(x)`, or 0 if x is below -87.
4. min_p, top_k, typical_p, top_p, each applied to the survivors of the previous one. vLLM puts min_p first and
   top_p after top_k, so that p is a share of the survivors. typical_p (arXiv 2202.00666) comes after the cuts
   that do not depend on the total mass and before the one that does, so that it can be combined with all of them.
   At least one token survives each cut.
   - min_p: weight >= min_p * the largest weight, that is x >= log(min_p).
   - top_k: the first k in the order of likelihood; always exactly k, because lower ids win ties.
   - typical_p: ordered by |x - mean of x|, the distance of the surprise from the entropy; the shortest
     prefix whose mass is at least typical_p.
   - top_p: in the order of likelihood, the shortest prefix whose mass is at least top_p.
5. A uniform number u in [0, 1) from `uniform(seed, counter)` selects the first survivor, by ascending id, whose
   cumulative weight exceeds u * total. Ascending ids need no sort, and u depends only on the request.

A logit of +inf is treated as the largest finite float32. A NaN logit, or a row without any permitted token, is an
error: see `raise_row_errors`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32, Float64, Int32, SamplingBatch, StepOutput
from octavo.errors import NumericalError, OctavoError, UsageError

ROW_OK = 0
ROW_NAN_LOGITS = 1
ROW_NOTHING_ALLOWED = 2
ROW_TOKEN_ID_OUT_OF_RANGE = 3


class RowError(NamedTuple):
    """The reason why no token can be chosen for a row.

    kind: error class that the request gets, depending on the cause.
    """

    reason: str
    kind: type[OctavoError]


_ROW_ERRORS = {
    ROW_NAN_LOGITS: RowError(
        "the model's logits contain NaN: its weights are damaged or its activations overflowed", NumericalError
    ),
    ROW_NOTHING_ALLOWED: RowError(
        "no token may be chosen: bias, allowed tokens, structured output and min_tokens forbid the whole vocabulary, "
        "or every logit is -inf; relax logit_bias, bad_words, allowed_token_ids or min_tokens",
        UsageError,
    ),
    ROW_TOKEN_ID_OUT_OF_RANGE: RowError(
        "a token id in the target, the history or the bias is outside the vocabulary", OctavoError
    ),
}

_LARGEST = np.finfo(np.float32).max
_SMALLEST_X = np.float32(-87.0)


def uniform(seed: NDArray[np.uint64], counter: NDArray[np.uint64]) -> Float64:
    """Return uniform numbers in [0, 1) with 53 bits, one for each pair of seed and counter.

    The splitmix64 finalizer (Steele et al., OOPSLA 2014) is applied to the seed, and again after adding the counter.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed.astype(np.uint64) + step) + (counter.astype(np.uint64) + np.uint64(1)) * step)
    draws: Float64 = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def sample(logits: Float32, batch: SamplingBatch) -> StepOutput:
    """Choose a token for each row of `logits` [R, vocab] with the options in `batch`; see this module's docstring for
    the stages.

    Raises OctavoError naming the row and the reason if a row has no defined outcome.
    """
    num_rows = logits.shape[0]
    num_top = max(int(batch.rows["num_logprobs"].max(initial=0)), 0)
    output = StepOutput.unsampled(num_rows, num_top)
    errors = np.zeros(num_rows, np.int32)
    draws = uniform(batch.rows["seed"], batch.rows["counter"])
    for row, options in enumerate(batch.rows):
        raw = np.minimum(logits[row], _LARGEST, dtype=np.float32)
        errors[row] = _row_error(raw, batch, row)
        if errors[row] == ROW_OK and options["target"] >= 0:
            output.token_ids[row] = options["target"]
        elif errors[row] == ROW_OK:
            processed = _process(raw, batch, row)
            if processed.max() == -np.inf:
                errors[row] = ROW_NOTHING_ALLOWED
            else:
                output.token_ids[row] = _choose(processed, options, float(draws[row]))
        if errors[row] == ROW_OK and options["num_logprobs"] >= 0:
            _report_logprobs(raw, int(options["num_logprobs"]), row, output)
    raise_row_errors(errors)
    return output


class SamplingError(OctavoError):
    """Some output rows have no defined outcome; the other rows of the step are valid.

    errors: the error of each such row, by output row.
    """

    def __init__(self, errors: dict[int, RowError]) -> None:
        row = min(errors)
        super().__init__(f"cannot sample output row {row}: {errors[row].reason}")
        self.errors = errors


def raise_row_errors(errors: Int32) -> None:
    """Raise SamplingError if any row of `errors` [R] is not ROW_OK."""
    codes = errors.tolist()
    if any(codes):
        raise SamplingError({row: _ROW_ERRORS[code] for row, code in enumerate(codes) if code != ROW_OK})


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def _row_error(raw: Float32, batch: SamplingBatch, row: int) -> int:
    history = batch.history_ids[batch.history_start[row] : batch.history_start[row + 1]]
    biased = batch.bias_ids[batch.bias_start[row] : batch.bias_start[row + 1]]
    ids = np.concatenate([history, biased])
    if batch.rows["target"][row] >= raw.size or np.any((ids < 0) | (ids >= raw.size)):
        return ROW_TOKEN_ID_OUT_OF_RANGE
    if np.isnan(raw).any():
        return ROW_NAN_LOGITS
    return ROW_OK if raw.max() > -np.inf else ROW_NOTHING_ALLOWED


def _process(raw: Float32, batch: SamplingBatch, row: int) -> Float32:
    """Apply stages 1 and 2 to a row: bias, mask, penalties."""
    logits: Float32 = raw.copy()
    options = batch.rows[row]
    biased = slice(batch.bias_start[row], batch.bias_start[row + 1])
    with np.errstate(over="ignore"):
        np.add.at(logits, batch.bias_ids[biased], batch.bias_values[biased])
        if batch.allowed_mask is not None:
            bits = np.unpackbits(batch.allowed_mask[row].astype("<u4").view(np.uint8), bitorder="little")
            logits[bits[: logits.size] == 0] = -np.inf
        seen = slice(batch.history_start[row], batch.history_start[row + 1])
        ids, counts = batch.history_ids[seen], batch.history_counts[seen]
        repetition = options["repetition_penalty"]
        if repetition != 1:
            logits[ids] = np.where(logits[ids] > 0, logits[ids] / repetition, logits[ids] * repetition)
        logits[ids] -= options["frequency_penalty"] * counts.astype(np.float32)
        logits[ids] -= np.where(counts > 0, options["presence_penalty"], np.float32(0))
        np.minimum(logits, _LARGEST, out=logits)
    return logits


def report_processed(output: StepOutput, batch: SamplingBatch, rows: Iterable[int]) -> None:
    """For these rows, report the distribution after stages 1 to 4, which is what tokens were drawn from.

    Ranks and most likely tokens are determined among the survivors; a row with few survivors reports only those.
    output: the step's output, including its logits.
    """
    assert output.logits is not None
    for row in rows:
        options, token = batch.rows[row], int(output.token_ids[row])
        if options["num_logprobs"] < 0 or token < 0:
            continue
        logits = _process(np.minimum(output.logits[row], _LARGEST, dtype=np.float32), batch, row)
        ids, x = _survivors(logits, options)
        if token not in ids:  # a border of a filter, where another sampler rounds in another way
            ids, x = np.sort(np.append(ids, token)), np.maximum(x, _SMALLEST_X)
        wide = x[ids].astype(np.float64)
        logprobs = wide - np.log(np.sum(np.exp(wide)))
        order = np.argsort(-logits[ids], kind="stable")
        place = int(np.flatnonzero(ids[order] == token)[0])
        output.logprobs[row], output.ranks[row] = logprobs[order[place]], place + 1
        top = order[: options["num_logprobs"]]
        output.top_ids[row], output.top_logprobs[row] = -1, np.nan
        output.top_ids[row, : top.size], output.top_logprobs[row, : top.size] = ids[top], logprobs[top]


def _choose(logits: Float32, options: np.void, draw: float) -> int:
    """Apply stages 3 to 5 to one row of processed logits."""
    ids, x = _survivors(logits, options)
    cumulative = np.cumsum(np.exp(x[ids].astype(np.float64)))
    position = np.searchsorted(cumulative, draw * cumulative[-1], side="right")
    return int(ids[min(int(position), ids.size - 1)])


def _survivors(logits: Float32, options: np.void) -> tuple[NDArray[np.int64], Float32]:
    """Apply stages 3 and 4 to one row of processed logits.

    Return the ids that may be drawn, ascending, and x of all ids.
    """
    if options["temperature"] <= 0:
        return np.array([np.argmax(logits)]), np.zeros_like(logits)
    with np.errstate(over="ignore"):
        x = (logits - logits.max()) / options["temperature"]
    ids = np.flatnonzero(x >= _SMALLEST_X)
    if options["min_p"] > 0:
        ids = ids[x[ids] >= np.float32(np.log(min(float(options["min_p"]), 1.0)))]
    if 0 < options["top_k"] < ids.size:
        ids = np.sort(_by_likelihood(logits, ids)[: options["top_k"]])
    if options["typical_p"] < 1:
        weights = np.exp(x[ids].astype(np.float64))
        distance = np.abs(x[ids] - np.float32(np.sum(weights * x[ids]) / np.sum(weights)))
        ids = _shortest_prefix(ids[np.argsort(distance, kind="stable")], x, float(options["typical_p"]))
    if options["top_p"] < 1:
        ids = _shortest_prefix(_by_likelihood(logits, ids), x, float(options["top_p"]))
    return ids, x


def _by_likelihood(logits: Float32, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort `ids`, given in ascending order, by likelihood."""
    ordered: NDArray[np.int64] = ids[np.argsort(-logits[ids], kind="stable")]
    return ordered


def _shortest_prefix(ordered: NDArray[np.int64], x: Float32, share: float) -> NDArray[np.int64]:
    """Return the shortest prefix of `ordered` with at least `share` of its mass, in ascending order; at
    least one id.
    """
    cumulative = np.cumsum(np.exp(x[ordered].astype(np.float64)))
    count = int(np.searchsorted(cumulative, share * cumulative[-1], side="left")) + 1
    return np.sort(ordered[:count])


def _report_logprobs(raw: Float32, num_logprobs: int, row: int, output: StepOutput) -> None:
    wide = raw.astype(np.float64)
    largest = wide.max()
    logprobs = wide - (largest + np.log(np.sum(np.exp(wide - largest))))
    token = int(output.token_ids[row])
    output.logprobs[row] = logprobs[token]
    earlier = np.count_nonzero(raw[:token] == raw[token])
    output.ranks[row] = 1 + np.count_nonzero(raw > raw[token]) + earlier
    top = _by_likelihood(raw, np.arange(raw.size))[:num_logprobs]
    output.top_ids[row, : top.size] = top
    output.top_logprobs[row, : top.size] = logprobs[top]
