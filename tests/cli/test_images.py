"""Images in `octavo run`, `octavo chat` and `LLM.chat`, with a tiny model that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cli.chat_images import dropped_images
from octavo.errors import UsageError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from tests.support.pictures import encoded, noise
from tests.support.processes import octavo_here
from tests.support.seeing import data_url
from tests.support.tiny_vision import save, tiny_model

GREEDY = ("--temperature", "0", "--max-tokens", "8", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3_vl"), tmp_path_factory.mktemp("seeing") / "model", "qwen3_vl")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("my pictures")
    paths = [folder / "one.png", folder / "two b.jpg"]
    for seed, path in enumerate(paths):
        path.write_bytes(encoded(noise(60, 44, seed), "JPEG" if path.suffix == ".jpg" else "PNG"))
    return paths


def say(model: Path, *arguments: str | Path, stdin: str = "") -> Any:
    result = octavo_here("run", model, *GREEDY, "--json", *arguments, stdin=stdin)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_run_shows_the_images_of_its_files(model: Path, pictures: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    plain = say(model, "What?")
    first, second = (say(model, "-f", path, "What?") for path in pictures)
    both = say(model, "-f", pictures[0], "-f", text, "-f", pictures[1], "What?")
    raw = say(model, "--raw", "-f", pictures[0], "What?")
    alone = say(model, "-f", pictures[0])
    sizes = [answer["timings"]["num_prompt_tokens"] for answer in (plain, first, second, both)]
    image = sizes[1] - sizes[0]
    assert sizes[2] == sizes[1] > sizes[0]
    assert sizes[3] == sizes[0] + 2 * image + len("words\n\n")
    assert raw["timings"]["num_prompt_tokens"] == image + len("What?")
    assert alone["timings"]["num_prompt_tokens"] == sizes[1] - len("What?")
    assert len({json.dumps(answer["text"]) for answer in (plain, first, second)}) == 3


def test_chat_takes_dropped_paths_and_the_command(model: Path, pictures: list[Path], tmp_path: Path) -> None:
    one, two = pictures
    file = tmp_path / "talk.json"
    escaped = str(two).replace(" ", "\\ ")
    bare = tmp_path / "three.png"
    bare.write_bytes(one.read_bytes())
    lines = f"What? '{one}'\n/image {two}\nAnd?\n{escaped}\n/image {tmp_path / 'none.png'}\n/save {file}\n"
    lines += f"/image {bare}\n"
    result = octavo_here("chat", model, *GREEDY, stdin=lines)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("attached one.png (60 x 44, ") == 1
    assert result.stdout.count("attached two b.jpg (60 x 44, ") == 2
    assert result.stdout.count("attached three.png (60 x 44, ") == 1
    assert "/image needs a file" not in result.stdout
    assert "none.png" in result.stdout
    messages = json.loads(file.read_text())["messages"]
    image = {"type": "image", "image": str(one)}
    assert messages[0] == {"role": "user", "content": [image, {"type": "text", "text": "What?"}]}
    assert [part["type"] for part in messages[2]["content"]] == ["image", "text"]
    again = octavo_here("chat", model, *GREEDY, stdin=f"/load {file}\nSo?\n")
    assert again.returncode == 0, again.stderr
    assert f"The conversation has {len(messages)} messages." in again.stdout


def test_a_model_that_only_reads_refuses_images(tiny: Path, pictures: list[Path]) -> None:
    result = octavo_here("run", tiny, "-f", pictures[0], "What?")
    assert result.returncode == 2
    assert "reads text only" in result.stderr


def test_a_model_that_only_reads_gets_the_text_of_a_document(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    from tests.support.videos import text_document

    (tmp_path / "a.pdf").write_bytes(text_document("A paper."))
    with LLM(str(tiny), num_threads=1, max_model_len=512, kv_cache_memory="8MiB") as llm:
        for document in (tmp_path / "a.pdf", (tmp_path / "a.pdf").read_bytes()):
            parts = [{"type": "document", "document": document}, {"type": "text", "text": "What?"}]
            template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            read = llm.chat_prompt([{"role": "user", "content": parts}], template)
            assert read.token_ids == llm.chat_prompt("A paper.\n\nWhat?", template).token_ids


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")
    from tests.support.videos import text_document

    path = tmp_path_factory.mktemp("papers") / "a.pdf"
    path.write_bytes(text_document("A paper."))
    return path


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_run_reads_a_document_as_pages_or_as_text(model: Path, paper: Path, raw: tuple[str, ...]) -> None:
    wanted, pages, text = (
        say(model, *raw, *arguments)["timings"]["num_prompt_tokens"]
        for arguments in (("A paper.\n\nWhat?",), ("-f", paper, "What?"), ("--pdf-as", "text", "-f", paper, "What?"))
    )
    assert text == wanted != pages


def test_chat_reads_a_document_as_text(model: Path, tiny: Path, paper: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name, options in ((model, ("--pdf-as", "text")), (tiny, ("--chat-template", template))):
        result = octavo_here("chat", name, *GREEDY, *options, stdin=f"What? '{paper}'\n/save {file}\n")
        assert result.returncode == 0, result.stderr
        assert "attached a.pdf (its text, " in result.stdout
        question = json.loads(file.read_text())["messages"][0]
        assert question == {"role": "user", "content": "A paper.\n\nWhat?"}


def test_programs_choose_pages_or_text(model: Path, tiny: Path, paper: Path, pictures: list[Path]) -> None:
    document: dict[str, Any] = {"type": "document", "document": paper}
    picture, question = {"type": "image", "image": pictures[0]}, {"type": "text", "text": "What?"}
    as_text = [{"type": "text", "text": "A paper.\n\nWhat?"}]

    def prompt(llm: LLM, *parts: dict[str, Any]) -> tuple[list[int], int]:
        found = llm.chat_prompt([{"role": "user", "content": list(parts)}])
        return list(found.token_ids), len(found.items)

    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 512, "kv_cache_memory": "8MiB"}
    with LLM(str(model), pdf_as="text", **options) as llm:
        assert prompt(llm, document, question) == (llm.encode_chat("A paper.\n\nWhat?"), 0)
        assert prompt(llm, picture, document, question) == prompt(llm, picture, *as_text)
        assert prompt(llm, {**document, "pdf_as": "pages"}, question)[1] == 1
        assert llm.document_text(paper) == "A paper."
        assert llm.document_text(pictures[0]) is None
        with pytest.raises(UsageError, match="pdf_as is 'words'; it must be auto, pages or text"):
            prompt(llm, {**document, "pdf_as": "words"})
    with LLM(str(model), **options) as llm:
        assert prompt(llm, document, question)[1] == 1
        assert prompt(llm, {**document, "pdf_as": "text"}, question) == (llm.encode_chat("A paper.\n\nWhat?"), 0)
        assert llm.document_text(paper) is None
    with LLM(str(tiny), **options) as llm, pytest.raises(UsageError, match="reads text only"):
        prompt(llm, {**document, "pdf_as": "pages"}, question)
    with pytest.raises(UsageError, match="pdf_as is 'page'; it must be auto, pages or text"):
        LLM(str(tiny), pdf_as="page")


def test_dropped_paths_are_found_only_at_the_end_and_only_if_they_exist(pictures: list[Path]) -> None:
    one, two = pictures
    assert dropped_images(f"What is this? {one}" if " " not in str(one) else f'What is this? "{one}"') == (
        "What is this?",
        [one],
    )
    assert dropped_images(f"'{one}' '{two}'") == ("", [one, two])
    for text in (f"'{one}' what is it?", "see /nowhere/a.png", "photo.png", "/image", "a sentence."):
        assert dropped_images(text) == (text, [])


def test_programs_give_images_in_every_form(model: Path, pictures: list[Path]) -> None:
    picture = noise(60, 44, 0)
    data = pictures[0].read_bytes()
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": pictures[0]},
        {"type": "image", "image": data},
        {"type": "image", "image": np.asarray(picture)},
        {"type": "image_pil", "image_pil": picture},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "image_url", "image_url": f"file://{pictures[0]}"},
    ]
    with LLM(str(model), max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        items = [llm.read_image(pictures[0]), *forms]
        contents = [[item if isinstance(item, dict) else {"type": "image", "image": item}] for item in items]
        text = {"type": "text", "text": "What?"}
        answers = llm.chat([[{"role": "user", "content": [*content, text]}] for content in contents], params)
        assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
        raw = {"prompt": f"{llm.image_mark}What?", "multi_modal_data": {"image": pictures[0]}}
        assert len(llm.generate([raw], params)[0].prompt_token_ids) > len("What?")
        for wrong, named in [
            ({"type": "image_url", "image_url": "https://example.com/a.png"}, "nothing is fetched here"),
            ({"type": "image_url", "image_url": "data:image/png,x"}, "not base64"),
            ({"type": "image", "image": b"no image"}, "is not a JPEG"),
        ]:
            with pytest.raises(UsageError, match=named):
                llm.chat([{"role": "user", "content": [wrong, text]}], params)
