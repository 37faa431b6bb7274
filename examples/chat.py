"""A conversation at the terminal: each answer appears as it is generated.

python examples/chat.py [MODEL]
"""

import sys

from octavo import LLM


def main(model: str = "smollm2") -> None:
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        while question := input("> "):
            messages.append({"role": "user", "content": question})
            answer = ""
            for delta in llm.stream(llm.chat_prompt(messages)):
                answer += delta.outputs[0].text
                print(delta.outputs[0].text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EOFError:
        print()
