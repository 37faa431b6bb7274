"""The forms of training data: which tokens are learnt, what is cut, and what is refused by its line."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from octavo.errors import UsageError
from octavo.finetune.examples import Examples, read_examples
from octavo.loader.checkpoint import open_checkpoint
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer
from tests.finetune.models import TEMPLATE, chat, write_lines, write_model

# As models that think have it: only the last answer shows its thoughts, and a prompt for one begins them.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('|')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("model"), TEMPLATE)


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    with closing(open_checkpoint(write_model(folder / "m", template=template))) as checkpoint:
        return load_tokenizer(checkpoint)


def read(tokenizer: Tokenizer, folder: Path, *records: dict[str, object], max_tokens: int = 500) -> Examples:
    return read_examples(write_lines(folder / "data.jsonl", records), tokenizer, max_tokens)


def learned(tokenizer: Tokenizer, examples: Examples) -> list[str]:
    """The learnt tokens of each example as text; a gap is shown as a bar."""
    found = []
    for text in examples.texts:
        runs, before = [], False
        for token, is_learned in zip(text.ids.tolist(), text.is_learned.tolist(), strict=True):
            if is_learned:
                runs = [*runs, []] if not before else runs
                runs[-1].append(token)
            before = is_learned
        found.append("|".join(tokenizer.decode(run, skip_special_tokens=False) for run in runs))
    return found


def test_all_answers_of_a_conversation_and_their_ends_are_learnt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    examples = read(tokenizer, tmp_path, chat("one", "two", "three", "four five"))
    assert learned(tokenizer, examples) == ["two<|im_end|>|four five<|im_end|>"]
    [text] = examples.texts
    whole = tokenizer.decode(text.ids.tolist(), skip_special_tokens=False)
    assert whole.startswith("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user")


def test_the_other_forms(tokenizer: Tokenizer, tmp_path: Path) -> None:
    parts = {"prompt": [{"role": "user", "content": "one"}], "completion": [{"role": "assistant", "content": "two"}]}
    records = [{"prompt": "one two", "completion": " three"}, {"text": "all of it"}, parts]
    end = tokenizer.decode([max(tokenizer.eos_token_ids)], skip_special_tokens=False)
    examples = read(tokenizer, tmp_path, *records)
    found = learned(tokenizer, examples)
    assert found[0].startswith(" three")
    assert found[1].startswith("all of it")
    assert all(text.ids[-1] in tokenizer.eos_token_ids for text in examples.texts[:2]), end
    assert found[2] == "two<|im_end|>"
    assert examples.lines == [1, 2, 3]


def test_only_answers_of_the_completion_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = chat("one", "two", "three", "four")["messages"]
    assert isinstance(messages, list)
    examples = read(tokenizer, tmp_path, {"prompt": messages[:3], "completion": messages[3:]})
    assert learned(tokenizer, examples) == ["four<|im_end|>"]


def test_earlier_answers_that_the_template_changes_are_examples_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, THINKING)
    examples = read(tokenizer, tmp_path, chat("one", "hm|two", "three", "so|four"))
    assert learned(tokenizer, examples) == ["hm|two<|im_end|>", "so|four<|im_end|>"]
    second = tokenizer.decode(examples.texts[1].ids.tolist(), skip_special_tokens=False)
    assert "assistant\ntwo<|im_end|>" in second
    assert examples.lines == [1, 1]


def test_an_answer_that_the_prompt_begins_otherwise(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, OPENING)
    assert learned(tokenizer, read(tokenizer, tmp_path, chat("one", "two"))) == ["two<|im_end|>"]


def test_control_tokens_in_messages_stay_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [text] = read(tokenizer, tmp_path, chat("a<|im_end|>b", "c")).texts
    ends = [i for i in text.ids.tolist() if tokenizer.tokens[i] == "<|im_end|>"]
    assert len(ends) == 2


def test_long_examples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A plain text is cut into pieces, an answer loses its end, and one beyond the length is left out."""
    long = "word " * 40
    records = [{"text": long}, chat("hi", long), chat(long, "hi")]
    examples = read(tokenizer, tmp_path, *records, max_tokens=24)
    assert all(len(text.ids) <= 24 for text in examples.texts)
    pieces = [t for t, line in zip(examples.texts, examples.lines, strict=True) if line == 1]
    whole = [token for text in pieces for token in text.ids.tolist()]
    assert tokenizer.decode(whole).startswith(long.strip())
    assert examples.lines[-1] == 2
    assert (examples.num_cut, examples.num_dropped) == (2, 1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: it is not valid JSON"),
        ("[1]", "it must be an object"),
        ('{"question": "a"}', "it has 'question'; write"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant message after another message"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}', "line 2: "),
        ('{"messages": []}', "nothing to learn"),
        *(
            (json.dumps({**chat("a", "b"), "chat_template_kwargs": given}), "chat_template_kwargs is")
            for given in ([1], "a", {"add_generation_prompt": True}, {"max_tokens": 1})
        ),
    ],
)
def test_mistakes_name_file_and_line(tokenizer: Tokenizer, tmp_path: Path, line: str, expected: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", [{"text": "fine"}])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match="line 2") as caught:
        read_examples(path, tokenizer, 100)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_data_without_an_answer_that_fits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", [chat("word " * 40, "hi")])
    with pytest.raises(UsageError, match="no line has an answer within 8 tokens"):
        read_examples(path, tokenizer, 8)
