"""Run an agent: the model calls tools until it has an answer. It uses a server such as `octavo serve qwen3:4b`.

    python examples/tool_agent.py "What is 17 times 23?" [--url http://127.0.0.1:8000/v1] [--model default]

Needs `pip install openai`.
"""

import argparse
import json

from openai import OpenAI

MAX_TURNS = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two whole numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def call(name: str, arguments: str) -> str:
    """Return the result of a tool, or an error for the model to read."""
    try:
        values = json.loads(arguments)
        return str(values["a"] * values["b"]) if name == "multiply" else f"error: there is no tool {name!r}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def run(client: OpenAI, model: str, question: str) -> str:
    """Return the answer, after at most MAX_TURNS turns."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for tool_call in message.tool_calls:
            result = call(tool_call.function.name, tool_call.function.arguments)
            print(f"{tool_call.function.name}({tool_call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    return f"no answer after {MAX_TURNS} turns"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="default")
    given = parser.parse_args()
    print(run(OpenAI(base_url=given.url, api_key="none"), given.model, given.question))


if __name__ == "__main__":
    main()
