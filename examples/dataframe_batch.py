"""Classify a column of a DataFrame in one batch.

    python examples/dataframe_batch.py reviews.csv answers.csv [MODEL]

The input file needs a column `review`. Needs `pip install pandas`.
"""

import sys

import pandas as pd

from octavo import LLM, SamplingParams, StructuredOutputsParams

KINDS = ["positive", "negative", "mixed"]


def main(source: str, target: str, model: str = "smollm2") -> None:
    frame = pd.read_csv(source)
    questions = [f"Is this review {', '.join(KINDS[:-1])} or {KINDS[-1]}?\n\n{text}" for text in frame["review"]]
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=KINDS))
    with LLM(model) as llm:
        frame["kind"] = [output.outputs[0].text for output in llm.chat(questions, params)]
    frame.to_csv(target, index=False)
    print(frame["kind"].value_counts().to_string())


if __name__ == "__main__":
    main(*sys.argv[1:])
