"""Documents and videos in every protocol: from the field of a request to the items of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from octavo.config import PdfAs
from octavo.media.decoding import PictureDecoder
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.server.test_images import SEEN as IMAGE
from tests.server.test_images import URL, USE, USER, chat, shown, text
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.seeing import base64_of, data_url, seeing, seeing_client
from tests.support.videos import encoded_document, encoded_video, frames, text_document

pytest.importorskip("av", reason="PyAV is not installed")
pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed")

FAMILIES = ("openai", "anthropic", "responses", "ollama", "llama_cpp", "tokenize")
PDF = encoded_document([Image.new("RGB", (48, 32), colour) for colour in ("red", "blue")])
VIDEO = encoded_video(frames(8, 64, 96), 4)
PAGE = "<|vision_start|>" + "#" * 6 + "<|vision_end|>"
SEEN = f"{USER}{PAGE * 2}"
FILM = f"{USER}<0.2 seconds>{PAGE}<1.5 seconds>{PAGE}"
FILE = {"type": "file", "file": {"file_data": data_url(PDF, "application/pdf")}}
BLOCK = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": base64_of(PDF)},
}
VIDEO_URL = {"type": "video_url", "video_url": {"url": data_url(VIDEO, "video/x-matroska")}}


def responses(**part: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_file", **part}]}]}


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(seeing(smollm2_tokenizer), *FAMILIES, **seeing_client()) as running:
        running.script = Script(["Hello"])
        yield running


@pytest.mark.parametrize(
    ("path", "body", "seen"),
    [
        ("/v1/chat/completions", chat(FILE, text("b")), f"{SEEN}b<|im_end|>"),
        (
            "/v1/chat/completions",
            chat({"type": "file", "file": {"file_data": base64_of(PDF), "filename": "A.PDF"}}),
            SEEN,
        ),
        ("/v1/chat/completions", chat(VIDEO_URL, text("b")), f"{FILM}b<|im_end|>"),
        ("/v1/chat/completions", chat({**VIDEO_URL, "video_url": data_url(VIDEO, "video/webm")}), FILM),
        ("/v1/chat/completions", chat({"type": "input_video", "input_video": {"data": base64_of(VIDEO)}}), FILM),
        (
            "/v1/chat/completions",
            chat({"type": "input_video", "input_video": {"url": data_url(VIDEO, "video/webm")}}),
            FILM,
        ),
        ("/v1/messages", {"max_tokens": 9, **chat(BLOCK, text("b"))}, f"{SEEN}b<|im_end|>"),
        ("/v1/messages", {"max_tokens": 9, **chat({**BLOCK, "title": "T", "context": "C"})}, f"{USER}T\nC{PAGE * 2}"),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}]},
                ],
            },
            PAGE * 2,
        ),
        ("/v1/responses", responses(file_data=data_url(PDF, "application/pdf"), filename="a.pdf"), SEEN),
        ("/v1/responses", responses(file_data=base64_of(PDF), filename="a.pdf"), SEEN),
        ("/api/chat", {**chat(), "messages": [{"role": "user", "content": "a", "images": [base64_of(PDF)]}]}, SEEN),
    ],
)
def test_pages_and_frames_are_items_of_the_prompt(server: ScriptedServer, path: str, body: Any, seen: str) -> None:
    answer = server.post(path, {**body, "stream": False})
    assert answer.status_code == 200, answer.text
    prompt = server.last_request.prompt
    assert seen in shown(server, prompt)
    assert len({item.key for item in prompt.items}) == 2


def test_a_marker_of_a_raw_prompt_is_a_whole_document(server: ScriptedServer) -> None:
    text = f"x {server.get('/props').json()['media_marker']} y"
    body = {"prompt": {"prompt_string": text, "multimodal_data": [base64_of(PDF)]}, "n_predict": 3}
    assert server.post("/completion", body).status_code == 200
    assert shown(server, server.last_request.prompt) == f"x {PAGE * 2} y"


@pytest.mark.parametrize(("path", "part"), [("/v1/messages/count_tokens", BLOCK), ("/tokenize", VIDEO_URL)])
def test_counts_need_no_pixels(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, part: dict[str, Any]
) -> None:
    route = "/v1/messages" if part is BLOCK else "/v1/chat/completions"
    assert server.post(route, {**chat(part, text("b")), "max_tokens": 9}).status_code == 200
    wanted = len(server.last_request.prompt)

    def fail(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(PictureDecoder, "shots", fail)
    answer = server.post(path, chat(part, text("b"))).json()
    assert answer.get("count", answer.get("input_tokens")) == wanted


WHERE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        (
            {"type": "file", "file": {"file_data": data_url(PDF[:200], "application/pdf")}},
            "invalid_document",
            f"{WHERE}.file.file_data: the document is damaged: PdfiumError",
        ),
        (
            {"type": "file", "file": {"file_id": "x"}},
            "unsupported_value",
            f"{WHERE}.type is a file, but fake reads only text, images, videos and PDF documents given as data",
        ),
        (
            {"type": "file", "file": {"file_data": base64_of(b"PK"), "filename": "a.docx"}},
            "unsupported_value",
            f"{WHERE}.type is a file, but fake reads only text, images, videos and PDF documents given as data",
        ),
        ({"type": "input_video"}, "unsupported_value", f"{WHERE}.type is a video, but fake reads"),
        (
            {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
            "invalid_value",
            f"{WHERE}.video_url.url is an https URL, but this server fetches no images",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(server: ScriptedServer, part: Any, code: str, message: str) -> None:
    answer = server.post("/v1/chat/completions", chat(part))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert message in error["message"]


def test_a_model_that_reads_gets_the_text_of_a_document(smollm2_tokenizer: Tokenizer) -> None:
    paper = text_document("A paper.", "Its end.")
    url, source = data_url(paper, "application/pdf"), {"type": "base64", "media_type": "application/pdf"}
    file = {"type": "file", "file": {"file_data": url}}
    document = {"type": "document", "source": {**source, "data": base64_of(paper)}}
    input_file = {"type": "input_file", "file_data": url, "filename": "a.pdf"}
    words = {"type": "input_text", "text": "b"}
    with scripted_server(smollm2_tokenizer, "openai", "anthropic", "responses", "tokenize") as server:
        server.script = Script(["Hello"])
        for path, body in (
            ("/v1/chat/completions", chat(file, text("b"))),
            ("/v1/messages", {"max_tokens": 9, **chat(document, text("b"))}),
            ("/v1/responses", {"input": [{"role": "user", "content": [input_file, words]}]}),
        ):
            answer = server.post(path, {**body, "stream": False})
            assert answer.status_code == 200, answer.text
            assert "A paper.\n\nIts end.\n\nb<|im_end|>" in shown(server, server.last_request.prompt)
        counted = server.post("/tokenize", chat(file, text("b"))).json()["count"]
        assert counted == len(server.last_request.prompt)


PAPER = text_document("A paper.", "Its end.")
PAPER_URL = data_url(PAPER, "application/pdf")
PAPER_SOURCE = {"type": "base64", "media_type": "application/pdf", "data": base64_of(PAPER)}


def asked(family: str, **choice: str) -> tuple[str, dict[str, Any]]:
    """A path and the body of a request there about a paper, with this choice in the part that has it."""
    if family == "responses":
        part = {"type": "input_file", "file_data": PAPER_URL, "filename": "a.pdf", **choice}
        return "/v1/responses", {
            "input": [{"role": "user", "content": [part, {"type": "input_text", "text": "b"}]}],
            "stream": False,
        }
    if family == "anthropic":
        part = {"type": "document", "source": PAPER_SOURCE, **choice}
        return "/v1/messages", {"max_tokens": 9, **chat(part, text("b"))}
    if family == "image_url":
        part = {"type": "image_url", "image_url": {"url": PAPER_URL}, **choice}
    else:
        part = {"type": "file", "file": {"file_data": PAPER_URL}, **choice}
    return "/v1/chat/completions", chat(part, text("b"))


@pytest.fixture(scope="module")
def choosing(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """A server whose model sees; a test sets the `pdf_as` of its engine."""
    families = ("openai", "anthropic", "responses", "ollama")
    config = ServerConfig(max_items_per_request=2)
    with scripted_server(seeing(smollm2_tokenizer), *families, config=config, **seeing_client()) as running:
        running.script = Script(["Hello"])
        yield running


PARTS = ("file", "image_url", "anthropic", "responses")
AS_TEXT = "A paper.\n\nIts end.\n\nb<|im_end|>"


@pytest.mark.parametrize("family", PARTS)
@pytest.mark.parametrize(
    ("default", "choice", "is_text"),
    [
        ("auto", None, False),
        ("auto", "text", True),
        ("auto", "pages", False),
        ("text", None, True),
        ("text", "pages", False),
        ("text", "auto", False),
        ("pages", "text", True),
    ],
)
def test_a_part_or_the_server_chooses_pages_or_text(
    choosing: ScriptedServer, family: str, default: PdfAs, choice: str | None, is_text: bool
) -> None:
    choosing.client.draft_info["pdf_as"] = default
    path, body = asked(family, **({} if choice is None else {"pdf_as": choice}))
    answer = choosing.post(path, body)
    assert answer.status_code == 200, answer.text
    prompt = choosing.last_request.prompt
    assert (AS_TEXT in shown(choosing, prompt)) == is_text
    assert len(prompt.items) == (0 if is_text else 2)


def test_documents_as_text_stand_beside_what_is_seen(choosing: ScriptedServer) -> None:
    """The default concerns documents alone, wherever they come from; all files of a request are counted together."""
    choosing.client.draft_info["pdf_as"] = "text"
    part = asked("file")[1]["messages"][0]["content"][0]
    assert choosing.post("/v1/chat/completions", chat(part, URL, text("b"))).status_code == 200
    assert f"A paper.\n\nIts end.{IMAGE}b<|im_end|>" in shown(choosing, choosing.last_request.prompt)
    error = choosing.post("/v1/chat/completions", chat(part, URL, URL)).json()["error"]
    assert error["code"] == "too_many_items"
    message = {"role": "user", "content": "b", "images": [base64_of(PAPER)]}
    assert choosing.post("/api/chat", {"messages": [message], "stream": False}).status_code == 200
    assert AS_TEXT in shown(choosing, choosing.last_request.prompt)


@pytest.mark.parametrize("family", ["file", "anthropic", "responses"])
def test_a_choice_that_a_model_cannot_satisfy_is_refused(
    choosing: ScriptedServer, smollm2_tokenizer: Tokenizer, family: str
) -> None:
    with scripted_server(smollm2_tokenizer, "openai", "anthropic", "responses") as blind:
        path, body = asked(family, pdf_as="pages")
        error = blind.post(path, body).json()["error"]
        assert "is a file, but fake reads text only: send its text, or use a vision model" in error["message"]
    path, body = asked(family, pdf_as="words")
    answer = choosing.post(path, body)
    assert answer.status_code in (400, 422)
    assert "pdf_as" in answer.json()["error"]["message"]


def test_a_scan_asked_for_as_text_says_what_reads_it(server: ScriptedServer) -> None:
    for path, part in (("/v1/chat/completions", FILE), ("/v1/messages", BLOCK)):
        body = {**chat({**part, "pdf_as": "text"}), "max_tokens": 9}
        error = server.post(path, body).json()["error"]
        assert "the document has no text, only pictures of its pages: use a vision model" in error["message"]
        assert "with pdf_as pages" in error["message"]


def test_a_model_that_reads_takes_as_many_documents_as_one_that_sees(smollm2_tokenizer: Tokenizer) -> None:
    file = {"type": "file", "file": {"file_data": data_url(text_document("A paper."), "application/pdf")}}
    with scripted_server(smollm2_tokenizer, "openai", config=ServerConfig(max_items_per_request=2)) as server:
        server.script = Script(["Hello"])
        assert server.post("/v1/chat/completions", chat(file, file)).status_code == 200
        messages = [*chat(file, file)["messages"], *chat(file)["messages"]]
        error = server.post("/v1/chat/completions", {"messages": messages}).json()["error"]
        assert error["code"] == "too_many_items"
        assert error["param"].startswith("messages[1].content")
        assert "has 3 images, documents and videos; at most 2 are allowed" in error["message"]


def test_a_model_that_reads_says_what_to_send(smollm2_tokenizer: Tokenizer) -> None:
    film = {"type": "file", "file": {"file_data": data_url(VIDEO, "video/x-matroska")}}
    with scripted_server(smollm2_tokenizer, "openai", "anthropic") as server:
        for path, part in (("/v1/chat/completions", FILE), ("/v1/messages", BLOCK)):
            error = server.post(path, {**chat(part), "max_tokens": 9}).json()["error"]
            assert "the document has no text, only pictures of its pages: use a vision model" in error["message"]
        error = server.post("/v1/chat/completions", chat(film)).json()["error"]
        assert error["message"] == (
            f"{WHERE}.type is a file, but fake reads text only: send its text, or use a vision model"
        )


def test_low_detail_takes_few_tokens_of_a_video(server: ScriptedServer) -> None:
    large = data_url(encoded_video(frames(4, 160, 240), 2), "video/x-matroska")
    counts = []
    for detail in ("high", "low"):
        for part in (
            {"type": "video_url", "video_url": {"url": large, "detail": detail}},
            {"type": "video_url", "video_url": large, "detail": detail},
        ):
            answer = server.post("/tokenize", chat(part))
            assert answer.status_code == 200, answer.text
            counts.append(answer.json()["count"])
    assert counts[0] == counts[1] > counts[2] == counts[3]


def test_a_document_beyond_the_context_names_both_numbers(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(seeing(smollm2_tokenizer), "openai", **seeing_client(), max_model_len=10) as server:
        error = server.post("/v1/chat/completions", chat(FILE)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "the document needs 12 tokens, but the context has only 9" in error["message"]
