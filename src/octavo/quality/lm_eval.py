"""Octavo as a model of lm-evaluation-harness (extra `octavo[eval]`).

    python -m octavo.quality.lm_eval run --model octavo --model_args pretrained=smollm2 --tasks hellaswag

This is the harness's own command with the model `octavo` added. In Python, importing this module registers the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.loader.finite_weights import check_weights
from octavo.quality.language_model import LanguageModel
from octavo.sampling_params import SamplingParams

_MAX_ANSWER_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # names of one limit
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OWN = ("batch_size", "max_batch_size", "device")  # set by the harness and ignored: the engine makes its own batches


@register_model("octavo")
class OctavoLM(LM):  # type: ignore[misc]  # the harness has no types
    """A model for the harness.

    pretrained: path, hub id or short name.

    The other arguments are fields of `EngineConfig`.
    """

    def __init__(self, pretrained: str, **options: Any) -> None:
        """Load the model.

        Raises the errors of `check_weights` and `LanguageModel`, and UsageError for an unknown field.
        """
        super().__init__()
        given = {name: value for name, value in options.items() if name not in _OWN}
        config = EngineConfig.resolve(pretrained, given)
        check_weights(config.model, config.revision)
        self._model = LanguageModel(config)
        self._name = pretrained

    @property
    def tokenizer_name(self) -> str:
        """Part of the names under which the harness caches requests."""
        return self._name.replace("/", "__")

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Return the log-probability of each continuation, and True if it is the greedy one."""
        pairs = [self._model.encode_pair(*request.args) for request in requests]
        return [(found.logprob, found.is_greedy) for found in self._model.likelihoods(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Return the log-probability of each whole text, in non-overlapping windows of the model's length."""
        pairs, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self._model.tokenizer.encode(request.args[0], add_special_tokens=False)
            prefix, length = self._model.prefix_token_id, self._model.max_length - 1
            for window in get_rolling_token_windows(tokens, prefix, length, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, found in zip(owners, self._model.likelihoods(pairs), strict=True):
            totals[owner] += found.logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Return the answers, each up to its stop texts."""
        prompts = [self._model.encode(request.args[0]) for request in requests]
        return self._model.generate(prompts, [_params(request.args[1]) for request in requests])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format the conversation with the model's template.

        From then on, control tokens in prompts are parsed as such.
        """
        self._model.parse_special = True
        session = self._model.session
        extra = {} if add_generation_prompt else {"add_generation_prompt": False, "continue_final_message": True}
        return session.render_chat(chat_history, **extra)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the template, for the harness's records."""
        return (self._model.tokenizer.template_source() or None) if chat_template else None

    def close(self) -> None:
        """Free the model."""
        self._model.close()


def _params(wanted: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of an answer. Raises UsageError for a field that would have no effect."""
    known = {"until", "do_sample", *_LENGTHS, *_SAMPLING}
    if unknown := sorted(wanted.keys() - known):
        raise UsageError(
            f"the task asks for {', '.join(unknown)}, which Octavo does not support; it supports {sorted(known)}"
        )
    until = wanted.get("until") or []
    length = next((wanted[name] for name in _LENGTHS if name in wanted), _MAX_ANSWER_TOKENS)
    sampling = {name: wanted[name] for name in _SAMPLING if name in wanted}
    if not wanted.get("do_sample", bool(sampling.get("temperature"))):
        sampling["temperature"] = 0.0
    return SamplingParams(max_tokens=int(length), stop=[until] if isinstance(until, str) else list(until), **sampling)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
