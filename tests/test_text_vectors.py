"""`LLM.embed` and `LLM.score` on encoders and rerankers: sentence-transformers, where it is installed, is the judge."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from octavo import LLM, AsyncLLM, ModelLoadError, UsageError
from octavo.engine.texts.scoring import plan_scores
from tests.support.text_models import (
    TEXTS,
    TOKENIZERS,
    encoder_metadata,
    save_decoder,
    save_encoder,
    save_pooling,
)
from tests.support.tiny_encoders import save_gguf, tiny_encoder

QUERY = "the fox?"
REAL_ENCODER = ("bert", "all-MiniLM-L6-v2 (safetensors)")
REAL = Path.home() / ".cache/octavo-models/all-MiniLM-L6-v2"


def embed(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


def scores(llm: LLM, texts: list[str]) -> list[float]:
    return [output.outputs.score for output in llm.score(QUERY, texts, use_tqdm=False)]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("pooling", "normalize"), [("cls", True), ("mean", False), ("last", True)])
def test_embeddings(name: str, pooling: str, normalize: bool, tmp_path: Path) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = save_pooling(save_encoder(name, tmp_path), pooling, normalize=normalize)
    expected = judge.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    with LLM(str(path)) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def dense_layers() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh()), nn.Sequential(nn.Linear(96, 32, bias=False), nn.Identity())


@pytest.mark.parametrize(("name", "pooling", "normalize"), [("bert", "cls", True), ("modernbert", "mean", False)])
def test_dense_modules(name: str, pooling: str, normalize: bool, tmp_path: Path) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = save_pooling(save_encoder(name, tmp_path), pooling, normalize=normalize, dense=dense_layers())
    expected = judge.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    assert expected.shape == (len(TEXTS), 32)
    with LLM(str(path)) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["bert", "gemma-embedding", "decoder"])
def test_dense_modules_follow_pooling(name: str, tmp_path: Path) -> None:
    """The published formula: the linear, its activation, and so on, then length 1."""
    path = save_decoder(tmp_path) if name == "decoder" else save_encoder(name, tmp_path)
    pooling = "last" if name == "decoder" else "mean"
    with LLM(str(save_pooling(path, pooling, normalize=False))) as llm:
        pooled = torch.from_numpy(embed(llm, TEXTS)).float()
    with torch.no_grad():
        expected = nn.functional.normalize(nn.Sequential(*dense_layers())(pooled)).numpy()
    with LLM(str(save_pooling(path, pooling, dense=dense_layers()))) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), expected, atol=1e-6)
        assert llm._session.model().hidden_size == 32
        cosines = expected @ expected[0]
        np.testing.assert_allclose([s.outputs.score for s in llm.score(TEXTS[0], TEXTS)], cosines, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert-biased"])
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_cross_encoders(name: str, activation: str | None, tmp_path: Path) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    config = {} if activation is None else {"sbert_ce_default_activation_function": activation}
    path = save_encoder(name, tmp_path, labels=1, **config)
    expected = judge.CrossEncoder(str(path), device="cpu").predict([(QUERY, text) for text in TEXTS])
    with LLM(str(path)) as llm:
        np.testing.assert_allclose(scores(llm, TEXTS), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is missing: all-MiniLM-L6-v2 in the sentence-transformers form")
def test_a_published_model() -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    expected = judge.SentenceTransformer(str(REAL), device="cpu").encode(TEXTS)
    with LLM(str(REAL)) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), expected, atol=1e-6)
        cosines = expected @ expected[0]
        np.testing.assert_allclose([s.outputs.score for s in llm.score(TEXTS[0], TEXTS)], cosines, atol=1e-5)


def test_a_decoder_with_a_head_of_classification(tmp_path: Path) -> None:
    path = save_decoder(tmp_path, labels=1)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        labels = [model(**tokenizer(QUERY, text, return_tensors="pt")).logits.item() for text in TEXTS]
    with LLM(str(path)) as llm:
        np.testing.assert_allclose(scores(llm, TEXTS), torch.sigmoid(torch.tensor(labels)), atol=2e-3)
        with pytest.raises(UsageError, match="cross-encoder: it generates no text; use /v1/embeddings"):
            llm.generate("x")
        with pytest.raises(UsageError, match="it scores pairs of texts and has no vectors"):
            llm.embed("x")


def test_a_causal_reranker(tmp_path: Path) -> None:
    """The probability of yes among yes and no after the prompt of Qwen3-Reranker, from all logits of transformers."""
    path = save_decoder(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    expected = []
    with LLM(str(path)) as llm:
        session = llm._session
        plan = plan_scores(session.model().engine.texts, llm.tokenizer, [(QUERY, text) for text in TEXTS], 640)
        for prompt, _ in plan.prompts:
            with torch.no_grad():
                logits = model(torch.tensor([prompt.token_ids])).logits[0, -1]
            expected.append(torch.softmax(logits[[yes, no]], 0)[0].item())
        assert "<Query>: the fox?\n<Document>: A<|im_end|>" in llm.tokenizer.decode(
            plan.prompts[2][0].token_ids, skip_special_tokens=False
        )
        np.testing.assert_allclose(scores(llm, TEXTS), expected, atol=2e-3)
        forged = (
            plan_scores(session.model().engine.texts, llm.tokenizer, [(QUERY, "<|im_end|>")], 640)
            .prompts[0][0]
            .token_ids
        )
        assert forged.count(llm.encode("<|im_end|>")[0]) == 2  # those of the prompt itself
        assert llm.generate("the fox")[0].outputs[0].token_ids


# The prompt of Qwen3-Reranker as sentence-transformers renders it: a message for each of a pair.
RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n"
    """<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n"""
    """<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}"""
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.mark.parametrize("tokens", [None, (7, 11)])
def test_a_causal_reranker_beside_its_library(tokens: tuple[int, int] | None, tmp_path: Path) -> None:
    """As a plain causal model and as the library saves it, with a module that names the tokens of yes and no."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = save_decoder(tmp_path / "plain")
    (path / "chat_template.jinja").write_text(RERANKER_TEMPLATE + "\n")  # Jinja drops the last one
    model = judge.CrossEncoder(str(path), device="cpu")
    if tokens is not None:
        model[1].true_token_id, model[1].false_token_id = tokens
    expected = model.predict([(QUERY, text) for text in TEXTS])
    model.save_pretrained(str(tmp_path / "saved"))
    for directory in [tmp_path / "saved", *([path] if tokens is None else [])]:
        with LLM(str(directory)) as llm:
            np.testing.assert_allclose(scores(llm, TEXTS), expected, atol=2e-3)
    assert np.ptp(expected) > 0.02


def _vocabulary(directory: Path) -> dict[str, object]:
    """That of a directory, under the keys of a GGUF file."""
    return encoder_metadata(Tokenizer.from_file(str(directory / "tokenizer.json")))


def test_gguf_files_give_the_same_as_directories(tmp_path: Path) -> None:
    directory = save_pooling(save_encoder("bert", tmp_path / "bert"), "cls")
    file = save_gguf(tiny_encoder("bert"), tmp_path / "bert.gguf", "cls", _vocabulary(directory))
    with LLM(str(directory)) as expected, LLM(str(file)) as llm:
        np.testing.assert_allclose(embed(llm, TEXTS), embed(expected, TEXTS), atol=1e-6)
    directory = save_encoder("xlm-roberta", tmp_path / "roberta", labels=1)
    model = tiny_encoder("xlm-roberta", labels=1)
    file = save_gguf(model, tmp_path / "roberta.gguf", "rank", _vocabulary(directory))
    with LLM(str(directory)) as expected, LLM(str(file)) as llm:
        np.testing.assert_allclose(scores(llm, TEXTS[:3]), scores(expected, TEXTS[:3]), atol=1e-6)


def test_async(tmp_path: Path) -> None:
    path = str(save_encoder("bert", tmp_path / "a"))
    labelled = str(save_encoder("bert", tmp_path / "b", labels=1))

    async def run() -> tuple[list[list[float]], list[float]]:
        async with AsyncLLM(path) as llm, AsyncLLM(labelled) as reranker:
            outputs = await asyncio.gather(*(llm.embed(text) for text in TEXTS))
            return [o.outputs.embedding for o in outputs], [o.outputs.score for o in await reranker.score(QUERY, TEXTS)]

    vectors, found = asyncio.run(run())
    with LLM(path) as llm, LLM(labelled) as reranker:
        assert vectors == embed(llm, TEXTS).tolist()
        assert found == scores(reranker, TEXTS)


def test_what_an_encoder_refuses(tmp_path: Path) -> None:
    with LLM(str(save_encoder("bert", tmp_path))) as llm:
        assert llm.max_model_len == 64
        with pytest.raises(UsageError, match="this model is an encoder: it generates no text; use /v1/embeddings"):
            llm.generate("x")
        with pytest.raises(UsageError, match="65 tokens; the context of 64 allows at most 64"):
            llm.embed([[5] * 65])
        with pytest.raises(UsageError, match="pooling is 'cls', but this model uses 'mean'"):
            llm.embed("x", pooling="cls")
        with pytest.raises(UsageError, match="data_1 has 2 texts and data_2 has 3"):
            llm.score(["a", "b"], ["a", "b", "c"])


def test_pairs_that_are_too_long(tmp_path: Path) -> None:
    with LLM(str(save_encoder("bert", tmp_path, labels=1))) as llm:
        long = " ".join(["fox"] * 100)
        with pytest.raises(UsageError, match=r"this model takes 64: shorten it, or set truncate_prompt_tokens"):
            llm.score(QUERY, long)
        (cut,) = llm.score(QUERY, long, truncate_prompt_tokens=-1)
        (shorter,) = llm.score(QUERY, long, truncate_prompt_tokens=40)
        assert cut.outputs.score != shorter.outputs.score
        with pytest.raises(UsageError, match="this model takes 4: shorten it"):
            llm.score(QUERY, long, truncate_prompt_tokens=4)
        with pytest.raises(UsageError, match="must be at least 1, or -1"):
            llm.score(QUERY, long, truncate_prompt_tokens=0)


def test_a_head_of_several_labels_scores_no_pairs(tmp_path: Path) -> None:
    path = save_encoder("bert", tmp_path, labels=3)
    with LLM(str(path)) as llm, pytest.raises(UsageError, match="it has 3 labels, not one"):
        llm.score("a", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1_Pooling/config.json": {"pooling_mode": "max"}}, r"pooling_mode is \['max'\]; it must be mean, cls, last"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
        ({"modules.json": [{"type": "x.CNN", "path": "2_CNN"}]}, "the module CNN is not supported"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../other"}]}, "is not a module"),
        ({"modules.json": [{"type": "x.Pooling", "path": "/etc"}]}, "must be a folder of the model"),
        ({"modules.json": {}}, "must be a list of 1 to 16 modules"),
    ],
)
def test_pooling_that_is_not_supported_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save_pooling(save_encoder("bert", tmp_path), "cls")
    for file, value in change.items():
        (path / file).write_text(json.dumps(value))
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "activation_function is 'torch.nn.modules.activ"),
        (
            {"activation_function": "torch.save"},
            r"activation_function is 'torch\.save': must be one of torch\.nn\.Iden",
        ),
        ({"activation_function": None}, "activation_function is None: must be one of"),
        ({"in_features": 63}, "2_Dense/config.json: in_features is 63, but the vectors before it have 64"),
        ({"out_features": 1 << 40}, "2_Dense/config.json: out_features is 1099511627776"),
        ({"use_residual": True}, "2_Dense/config.json: use_residual is True: must be False"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings': must be sentence_embedd"),
        ({"dropout": 0.1}, "2_Dense/config.json: dropout is 0.1: not supported"),
        ({"bias": False}, "2_Dense/model.safetensors: has the tensors .* but config.json asks for .*96, 64"),
    ],
)
def test_dense_modules_that_are_not_supported_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = save_pooling(save_encoder("bert", tmp_path), "cls", dense=dense_layers()[:1])
    config = path / "2_Dense/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(path))


def test_dense_modules_have_a_place_and_a_file(tmp_path: Path) -> None:
    path = save_pooling(save_encoder("bert", tmp_path), "cls", dense=dense_layers()[:1])
    (path / "2_Dense/model.safetensors").rename(path / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"2_Dense/model\.safetensors: no such file\. If you trust"):
        LLM(str(path))
    modules = json.loads((path / "modules.json").read_text())
    (path / "modules.json").write_text(json.dumps([*modules[:2], modules[3], modules[2]]))
    with pytest.raises(ModelLoadError, match="the module Dense in 2_Dense must be between Pooling and Normalize"):
        LLM(str(path))


def test_an_unknown_activation_of_a_score_is_refused(tmp_path: Path) -> None:
    path = save_encoder("bert", tmp_path, labels=1, sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(ModelLoadError, match=r"activation_fn is 'torch.nn.Tanh'; it must be Sigmoid or Identity"):
        LLM(str(path))
