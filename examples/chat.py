"""Chat with a model at the terminal. Each answer appears as it is generated.

python examples/chat.py [MODEL]
"""

import sys
from dataclasses import replace

from octavo import LLM


def main(model: str = "smollm2") -> None:
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        params = replace(llm.get_default_sampling_params(), max_tokens=512)
        while question := input("> "):
            messages.append({"role": "user", "content": question})
            answer = ""
            for delta in llm.stream(llm.chat_prompt(messages), params):
                answer += delta.outputs[0].text
                print(delta.outputs[0].text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EOFError:
        print()
