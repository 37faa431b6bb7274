"""Run a LangChain chain on a server that `octavo serve` has started.

    python examples/langchain_chain.py "rain" [URL] [MODEL]

Needs `pip install langchain-openai`.
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(subject: str = "rain", url: str = "http://127.0.0.1:8000/v1", model: str = "default") -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You write haiku."), ("user", "Write one about {subject}.")])
    llm = ChatOpenAI(model=model, base_url=url, api_key="none", max_tokens=64)
    for piece in (prompt | llm | StrOutputParser()).stream({"subject": subject}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
