"""Stream several answers at once in an asyncio program.

python examples/streaming.py [MODEL]
"""

import asyncio
import sys

from octavo import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = ("Name three primes.", "Why is the sky blue?", "Write a haiku about rain.")


async def answer(llm: AsyncLLM, number: int, question: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, output_kind=RequestOutputKind.DELTA)
    async for delta in llm.chat(question, params):
        print(f"[{number}] {delta.outputs[0].text!r}")


async def main(model: str = "smollm2") -> None:
    async with AsyncLLM(model) as llm:
        await asyncio.gather(*(answer(llm, number, question) for number, question in enumerate(QUESTIONS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
