"""Search by meaning: store the embeddings of texts in a numpy array and find the nearest ones to a question.

    python examples/semantic_search.py "How do I cook rice?" [MODEL]

Any model can embed texts, but an embedding model such as `BAAI/bge-small-en-v1.5` does it well.
"""

import sys

import numpy as np

from octavo import LLM

TEXTS = (
    "Rinse the rice, then simmer it in twice its volume of water.",
    "The train to Porto leaves at nine in the morning.",
    "Vectors of similar texts point in similar directions.",
    "A cat sleeps for up to sixteen hours a day.",
)


def main(question: str = "How do I cook rice?", model: str = "BAAI/bge-small-en-v1.5") -> None:
    with LLM(model) as llm:
        vectors = np.array([output.outputs.embedding for output in llm.embed(list(TEXTS))])
        [asked] = llm.embed(question)
    scores = vectors @ np.array(asked.outputs.embedding)  # vectors have length 1, so this is the cosine
    for at in np.argsort(-scores):
        print(f"{scores[at]:.3f}  {TEXTS[at]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
