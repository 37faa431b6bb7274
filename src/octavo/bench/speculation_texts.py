"""Prompts of eight kinds for measuring drafts, from editing files to free conversation."""

_INVENTORY = """
def load(path):
    items = {}
    with open(path) as file:
        for line in file:
            name, count = line.strip().split(",")
            items[name] = int(count)
    return items


def save(path, items):
    with open(path, "w") as file:
        for name in sorted(items):
            file.write(f"{name},{items[name]}\\n")


def add(items, name, count):
    items[name] = items.get(name, 0) + count
    return items


def remove(items, name, count):
    if items.get(name, 0) < count:
        raise ValueError(f"only {items.get(name, 0)} of {name} are left")
    items[name] -= count
    if items[name] == 0:
        del items[name]
    return items


def report(items):
    total = 0
    for name in sorted(items):
        print(f"{name:<20}{items[name]:>6}")
        total += items[name]
    print(f"{'total':<20}{total:>6}")
"""

_ARTICLE = """The town of Hallen has rebuilt its old harbour in four years. The first stage, finished in 2021, \
replaced the wooden piers by concrete ones and cost 3.2 million euros. The second stage brought a fish market with \
24 stalls, which opened in May 2022. Mayor Ida Brandt says that the number of visitors has doubled since then, from \
40,000 to 81,000 a year. Not everybody is content: fishermen such as Ole Tamm complain that mooring fees have risen \
from 90 to 140 euros a month. The last stage, a swimming area with a sauna, opens this summer. A ferry to the island \
of Vell will leave twice a day from the new eastern pier."""

EDITS = ("rename in a file", "types in a file")
PROMPTS: dict[str, str] = {
    "rename in a file": "Rename the parameter `items` to `stock` everywhere in this file. Answer with the whole file "
    f"and nothing else.\n```python{_INVENTORY}```",
    "types in a file": "Add type annotations to the functions of this file. Answer with the whole file and nothing "
    f"else.\n```python{_INVENTORY}```",
    "code and tests": "Write an LRU cache in Python as a class with `get` and `put`, and tests for it with pytest.",
    "a script": "Write a Python script that reads a CSV file and writes its rows to a table of an SQLite database.",
    "summary": f"Summarize this text in five bullet points.\n\n{_ARTICLE}",
    "JSON of a text": "Extract the persons, places and amounts of money of this text as JSON with the keys `persons`, "
    f"`places` and `amounts`.\n\n{_ARTICLE}",
    "explanation": "Explain to a child of eight why the sky is blue and the evening sky red.",
    "plan": "Make a plan for a weekend with two children in a town by the sea, hour by hour.",
}
