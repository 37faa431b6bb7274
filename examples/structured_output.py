"""Get an answer as a Python object: the model can only write JSON that matches the class.

    python examples/structured_output.py [MODEL]

Needs only Octavo, which installs pydantic.
"""

import sys

from pydantic import BaseModel, ConfigDict, Field

from octavo import LLM, SamplingParams, StructuredOutputsParams


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the model may not add fields of its own

    name: str = Field(pattern=r"^[A-Z][a-z]{1,15}$")
    age: int = Field(ge=0, le=120)


def main(model: str = "smollm2") -> None:
    constraint = StructuredOutputsParams(json=Person)
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=constraint)
    with LLM(model) as llm:
        [output] = llm.chat("Invent a person who lives in Lisbon.", params)
    person = Person.model_validate_json(output.outputs[0].text)
    print(f"{person.name} is {person.age} years old.")


if __name__ == "__main__":
    main(*sys.argv[1:])
