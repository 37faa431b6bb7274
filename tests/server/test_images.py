"""Images in every protocol: from the field of a request to the item of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.media.decoding import PictureDecoder
from octavo.media.digest import content_digest
from octavo.media.pictures import picture_of_array
from octavo.media.processor import read_processor
from octavo.prompt import MediaItem, Prompt
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.pictures import encoded, noise
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.seeing import SETTINGS, base64_of, data_url, seeing, seeing_client

FAMILIES = ("openai", "anthropic", "responses", "ollama", "llama_cpp", "tokenize", "models", "tgi")
PICTURE = noise(96, 64)
PNG = encoded(PICTURE, "PNG")
NUM_TOKENS = 3 * 2  # of PICTURE
URL = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}}
SEEN = "<|vision_start|>" + "#" * NUM_TOKENS + "<|vision_end|>"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("local")
    (folder / "in.png").write_bytes(PNG)
    (folder.parent / "out.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(folder.parent / "out.png")
    config = ServerConfig(allowed_local_media_path=str(folder), max_items_per_request=3, max_image_pixels=1_000_000)
    with scripted_server(seeing(smollm2_tokenizer), *FAMILIES, config=config, **seeing_client()) as running:
        running.script = Script(["Hello"])
        yield running


def shown(server: ScriptedServer, prompt: Prompt) -> str:
    """The prompt as text, with # for each position of an image."""
    pieces, at = [], 0
    for span in prompt.spans:
        pieces.append(server.client.tokenizer.decode(prompt.token_ids[at : span.start], skip_special_tokens=False))
        pieces.append("#" * span.length)
        at = span.end
    pieces.append(server.client.tokenizer.decode(prompt.token_ids[at:], skip_special_tokens=False))
    return "".join(pieces)


def check_item(item: MediaItem) -> None:
    processor = read_processor(SETTINGS.model_type, SETTINGS.config, SETTINGS.preprocessor)
    layout = processor.layout(96, 64)
    wanted = processor.resize(picture_of_array(np.asarray(PICTURE)), layout)
    assert item.layout == layout
    assert [tile.tobytes() for tile in item.tiles] == [tile.tobytes() for tile in wanted]
    assert item.key == content_digest("image", PNG, processor)


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USER = "<|im_start|>user\n"


@pytest.mark.parametrize(
    ("path", "body", "seen"),
    [
        ("/v1/chat/completions", chat(text("a"), URL, text("b")), f"{USER}a{SEEN}b<|im_end|>"),
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": data_url(PNG)}), f"{USER}{SEEN}<|im_end|>"),
        (
            "/v1/chat/completions",
            chat({"type": "image", "image": data_url(PNG), "uuid": "x"}),
            f"{USER}{SEEN}<|im_end|>",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "file", "file": {"file_data": base64_of(PNG), "filename": "a.PNG"}}),
            f"{USER}{SEEN}<|im_end|>",
        ),
        ("/v1/messages", {"max_tokens": 9, **chat(BLOCK, text("b"))}, f"{USER}{SEEN}b<|im_end|>"),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "assistant", "content": [USE]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("r"), BLOCK]}],
                    },
                ],
            },
            f"r{SEEN}",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                **chat(
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}, BLOCK, text("?")
                ),
            },
            f"{USER}T\nwords{SEEN}?<|im_end|>",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(PNG)}]}]},
            f"{USER}{SEEN}<|im_end|>",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_file", "file_data": data_url(PNG), "filename": "a.png"}],
                    }
                ]
            },
            f"{USER}{SEEN}<|im_end|>",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    CALL,
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": data_url(PNG)}],
                    },
                ]
            },
            SEEN,
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": [base64_of(PNG)]}], "stream": False},
            f"{USER}{SEEN}a<|im_end|>",
        ),
        ("/api/generate", {"prompt": "a", "images": [base64_of(PNG)], "stream": False}, f"{USER}{SEEN}a<|im_end|>"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [base64_of(PNG)], "stream": False}, f"{SEEN}a"),
    ],
)
def test_every_protocol_makes_the_same_item(server: ScriptedServer, path: str, body: Any, seen: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    prompt = server.last_request.prompt
    assert seen in shown(server, prompt)
    (span,) = prompt.spans
    assert span.item is not None
    check_item(span.item)


def test_usage_has_the_tokens_of_images(server: ScriptedServer) -> None:
    usage = server.post("/v1/chat/completions", chat(URL, URL, text("b"))).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 2 * NUM_TOKENS}
    assert usage["prompt_tokens"] == len(server.last_request.prompt)
    plain = server.post("/v1/chat/completions", chat(text("b"))).json()["usage"]
    assert plain["prompt_tokens_details"] == {"cached_tokens": 0}
    image = {"type": "input_image", "image_url": data_url(PNG)}
    body = {"input": [{"role": "user", "content": [image]}]}
    assert server.post("/v1/responses", body).json()["usage"]["input_tokens_details"]["image_tokens"] == NUM_TOKENS


def test_no_text_stands_for_an_image(server: ScriptedServer) -> None:
    forged = "<|image_pad|><|vision_start|><image-0>"
    server.post("/v1/chat/completions", chat(text(forged), URL, text(forged)))
    prompt = server.last_request.prompt
    assert shown(server, prompt).startswith(f"{USER}{forged}{SEEN}{forged}")
    assert prompt.token_ids.count(server.client.tokenizer.tokens.index("<|image_pad|>")) == 0
    assert len(prompt.spans) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}",
    ],
)
def test_templates_that_write_no_image_get_the_model_s_marks(smollm2_tokenizer: Tokenizer, template: str) -> None:
    with scripted_server(seeing(smollm2_tokenizer, template), "openai", **seeing_client()) as server:
        assert server.post("/v1/chat/completions", chat(text("a"), URL, text("b"))).status_code == 200
        assert shown(server, server.last_request.prompt) == f"[a{SEEN}b]"


def test_a_template_that_drops_images_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(seeing(smollm2_tokenizer, "[nothing]"), "openai", **seeing_client()) as server:
        error = server.post("/v1/chat/completions", chat(URL)).json()["error"]
        assert error["message"] == "the chat template does not show all images of the conversation"


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("/v1/messages/count_tokens", lambda answer: answer["input_tokens"]),
        ("/v1/chat/completions/input_tokens", lambda answer: answer["input_tokens"]),
        ("/tokenize", lambda answer: answer["count"]),
    ],
)
def test_counts_need_only_the_header(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, read: Callable[[Any], int]
) -> None:
    part = BLOCK if "messages" in path else URL
    body = chat(text("a"), part, part, text("b"))
    route = "/v1/messages" if part is BLOCK else "/v1/chat/completions"
    assert server.post(route, {**body, "max_tokens": 9}).status_code == 200
    wanted = len(server.last_request.prompt)

    def fail(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(PictureDecoder, "tiles", fail)
    assert read(server.post(path, body).json()) == wanted


def test_counting_encodes_the_placeholder_once(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, seen = Tokenizer.encode, []

    def counted(self: Tokenizer, words: str, **options: Any) -> list[int]:
        seen.append(words)
        return encode(self, words, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    assert server.post("/tokenize", chat(text("many words " * 100), URL)).json()["count"] > 200
    assert seen.count("<|image_pad|>") == 1


WHERE = "messages[0].content[0].image_url.url"


def url(value: str, **fields: Any) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": value, **fields}})


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (url("data:image/png;base64,aGk"), "invalid_value", f"{WHERE}: the image is not base64"),
        (url("data:image/png;base64,aGk =="), "invalid_value", f"{WHERE}: the image is not base64"),
        (
            url("data:image/png,aGk="),
            "invalid_value",
            f"{WHERE} is a data URL without base64; send data:image/png;base64,...",
        ),
        (
            url(data_url(b"hello")),
            "invalid_image",
            f"{WHERE}: the image is not a JPEG, PNG, WebP, GIF or BMP file",
        ),
        (url(data_url(PNG[: len(PNG) // 2])), "invalid_image", f"{WHERE}: the image is damaged: it ends early"),
        (
            url(data_url(encoded(noise(1300, 900), "PNG"))),
            "image_too_large",
            f"{WHERE}: the image is 1300 x 900 pixels, more than the 1 million of --max-image-pixels",
        ),
        (
            url(data_url(encoded(noise(2100, 10), "PNG"))),
            "image_too_narrow",
            f"{WHERE}: the image is 2100 x 10 pixels: one side is more than 200 times the other, too much for "
            "this model; crop it",
        ),
        (
            url("http://example.com/a.png"),
            "invalid_value",
            f"{WHERE} is an http URL, but this server fetches no images; send the image as data:image/png;base64,... "
            "or start the server with --allowed-media-domains",
        ),
        (url("ftp://x/y"), "invalid_value", f"{WHERE} is not an image URL; send data:image/png;base64,..."),
        (
            chat(*[URL] * 4),
            "too_many_items",
            "the request has 4 images, documents and videos; at most 3 are allowed (--max-items-per-request)",
        ),
        (
            chat({"type": "image_embeds", "image_embeds": "x"}),
            "unsupported_value",
            "messages[0].content[0].type is an image in a form that is not supported; send it as "
            "data:image/png;base64,...",
        ),
        (
            chat({"type": "input_audio", "input_audio": {}}),
            "unsupported_value",
            "messages[0].content[0].type is audio, but fake reads text and images only",
        ),
        (url("file:///etc/passwd"), "invalid_image_url", "folder of local images"),
        (url("file://host/a.png"), "invalid_image_url", "folder of local images"),
    ],
)
def test_what_cannot_be_read_is_refused(server: ScriptedServer, body: Any, code: str, message: str) -> None:
    before = len(server.client.requests)
    answer = server.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert message in error["message"]
    assert len(server.client.requests) == before


def test_local_files_lie_in_the_one_folder(server: ScriptedServer) -> None:
    app_folder = Path(local_folder(server))
    assert server.post("/v1/chat/completions", url(f"file://{app_folder}/in.png")).status_code == 200
    for name in ("../out.png", "link.png", "missing.png", "%2e%2e/out.png"):
        error = server.post("/v1/chat/completions", url(f"file://{app_folder}/{name}")).json()["error"]
        assert error["code"] == "invalid_image_url", name


def local_folder(server: ScriptedServer) -> str:
    return str(server.config.allowed_local_media_path)


def test_a_picture_beyond_the_context_names_both_numbers(smollm2_tokenizer: Tokenizer) -> None:
    fields = {**seeing_client(), "max_model_len": 64}
    with scripted_server(seeing(smollm2_tokenizer), "openai", **fields) as server:
        error = server.post("/v1/chat/completions", url(data_url(encoded(noise(512, 512), "PNG")))).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the image needs 256 tokens, but the context has only 63" in error["message"]


def test_low_detail_takes_the_fewest_tokens(server: ScriptedServer) -> None:
    large = data_url(encoded(noise(640, 640), "PNG"))
    sizes = {}
    for detail in ("low", "high", "auto"):
        assert server.post("/v1/chat/completions", url(large, detail=detail)).status_code == 200
        sizes[detail] = server.last_request.prompt.spans[0].length
    assert sizes == {"low": 4, "high": 400, "auto": 400}


def test_turns_that_are_left_out_take_their_images_with_them(server: ScriptedServer) -> None:
    first, last = data_url(encoded(noise(640, 640), "PNG")), data_url(PNG)
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": first}, text("old")]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "image_url", "image_url": last}, text("new")]},
    ]
    body = {"messages": messages, "truncate_prompt_tokens": 100, "truncation_side": "turns"}
    assert server.post("/v1/chat/completions", body).status_code == 200
    (span,) = server.last_request.prompt.spans
    assert span.item is not None
    check_item(span.item)


def test_a_raw_prompt_has_a_marker_for_each_image(server: ScriptedServer) -> None:
    props = server.get("/props").json()
    marker = props["media_marker"]
    assert props["modalities"] == {"vision": True, "audio": False}
    prompt = {"prompt_string": f"x {marker} y {marker}", "multimodal_data": [base64_of(PNG)] * 2}
    assert server.post("/completion", {"prompt": prompt, "n_predict": 3}).status_code == 200
    assert shown(server, server.last_request.prompt) == f"x {SEEN} y {SEEN}"
    forged = f"<|image_pad|>{marker} {marker}"
    for wrong, message in [
        ({**prompt, "multimodal_data": [base64_of(PNG)]}, "2 image markers but 1 images"),
        ({**prompt, "prompt_string": forged}, "contains the image token <|image_pad|>"),
    ]:
        error = server.post("/completion", {"prompt": wrong}).json()["error"]
        assert message in error["message"]


def test_a_stored_conversation_keeps_its_images(server: ScriptedServer) -> None:
    image = {"type": "input_image", "image_url": data_url(PNG)}
    first = server.post("/v1/responses", {"input": [{"role": "user", "content": [image]}], "store": True}).json()
    body = {"previous_response_id": first["id"], "input": "And?"}
    assert server.post("/v1/responses", body).status_code == 200
    prompt = server.last_request.prompt
    assert f"{USER}{SEEN}<|im_end|>" in shown(server, prompt)
    assert len(prompt.spans) == 1


def test_models_say_whether_they_see(server: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    assert server.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    assert "vision" in server.post("/api/show", {"model": "fake"}).json()["capabilities"]
    with scripted_server(smollm2_tokenizer, "models", "ollama", "llama_cpp") as blind:
        assert blind.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]
        assert "vision" not in blind.post("/api/show", {"model": "fake"}).json()["capabilities"]
        assert blind.get("/props").json()["modalities"]["vision"] is False


def test_a_missing_vision_part_is_named(smollm2_tokenizer: Tokenizer) -> None:
    missing = (
        "reads text only: its vision encoder is missing; put mmproj-*.gguf next to the model or name it with --mmproj"
    )
    fields = {"draft_info": {"no_images": missing}}
    with scripted_server(seeing(smollm2_tokenizer), "openai", **fields) as server:
        error = server.post("/v1/chat/completions", chat(URL)).json()["error"]
    assert error["message"] == f"messages[0].content[0].type is an image, but fake {missing}"
    assert error["code"] == "unsupported_value"


def test_bodies_with_images_may_be_larger(server: ScriptedServer) -> None:
    large = encoded(noise(900, 900), "BMP") + bytes(9 << 20)
    assert server.post("/v1/chat/completions", url(data_url(large))).status_code == 200
    answer = server.post("/v1/completions", {"prompt": "a" * (9 << 20)})
    message = "the body is larger than 8388608 bytes; send less at once, or start the server with --max-body-bytes"
    assert (answer.status_code, answer.json()["error"]["message"]) == (413, message)


def test_bodies_are_small_where_no_model_sees(smollm2_tokenizer: Tokenizer) -> None:
    """A model that is not loaded yet might see: `ModelManager.may_see`."""
    with scripted_server(smollm2_tokenizer, "openai") as blind:
        answer = blind.post("/v1/chat/completions", chat(text("a" * (9 << 20))))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert "larger than 8388608 bytes" in answer.json()["error"]["message"]


def test_templates_show_images_where_they_are_applied(server: ScriptedServer) -> None:
    prompt = server.post("/apply-template", chat(text("a"), URL)).json()["prompt"]
    assert prompt.startswith(f"{USER}a<|vision_start|><|image_pad|><|vision_end|><|im_end|>")


def test_a_conversation_with_images_is_embedded(server: ScriptedServer) -> None:
    """As vLLM takes it: `messages` in place of `input`, without the mark of an answer."""
    answer = server.post("/v1/embeddings", chat(text("a"), URL)).json()
    prompt = server.last_request.prompt
    assert prompt.spans[0].item is not None
    assert shown(server, prompt).endswith(f"a{SEEN}<|im_end|>\n")
    check_item(prompt.spans[0].item)
    assert answer["usage"]["prompt_tokens_details"] == {"image_tokens": NUM_TOKENS}
    assert len(answer["data"]) == 1
    assert np.linalg.norm(answer["data"][0]["embedding"]) == pytest.approx(1, abs=1e-6)
    both = server.post("/v1/embeddings", {**chat(text("a")), "input": "b"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "messages")
