"""An engine's answers to every kind of request, to compare engines that must give the same answers."""

from __future__ import annotations

from octavo import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

PROMPT = "the quick brown fox jumps over the lazy dog and then it "
PROMPTS = [PROMPT, PROMPT + "sleeps", "a dog", "one two three four five six seven"]


def answers(llm: LLM) -> list[object]:
    """Return tokens of greedy answers (first for each of `PROMPTS`), with a cached prefix, beams, a choice, and a seed.

    The cache must be small enough for sequences to be preempted.
    """
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found: list[object] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
    assert llm.metrics.num_preemptions_total > 0
    # What is evicted before depends on the times of steps: these decide how many drafts they have.
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    again = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0]
    assert again.num_cached_tokens
    beams = llm.beam_search(PROMPTS[2:3], BeamSearchParams(beam_width=3, max_tokens=8))
    choice = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    found += [again.outputs[0].token_ids, [beam.tokens for beam in beams[0].sequences]]
    found.append(llm.generate(PROMPTS[1], choice)[0].outputs[0].text)
    seeded = SamplingParams(temperature=1, seed=5, max_tokens=20, logprobs=2)
    return [*found, llm.generate(PROMPTS[3], seeded)[0].outputs[0].token_ids]
