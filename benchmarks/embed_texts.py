"""Compare embedding throughput of a random encoder (33 million parameters) with sentence-transformers on short texts.

    python benchmarks/embed_texts.py [--texts 256] [--runs 7] [--threads N]

The shape is that of bge-small (12 layers of 384, 12 heads, MLP of 1536), the weights are float32 and random, the texts
are pieces of `octavo/quality/data` of 6 to 30 words. Both programs get the same directory, tokenize, compute and give
vectors of length 1, in turns; the median of the runs counts. Each uses all processors that this process may use, or
N threads. Processor seconds are printed as well as wall time; on a busy machine only processor seconds are
comparable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "src" / "octavo" / "quality" / "data"
TEXTS = [DATA / "code.txt", DATA / "prose.txt"]
VOCAB_SIZE = 30522


def short_texts(count: int) -> list[str]:
    """Return pieces of 6 to 30 words."""
    words = " ".join(path.read_text(encoding="utf-8") for path in TEXTS).split()
    rng, texts, position = np.random.default_rng(0), [], 0
    for _ in range(count):
        length = int(rng.integers(6, 31))
        if position + length > len(words):
            position = 0
        texts.append(" ".join(words[position : position + length]))
        position += length
    return texts


def save_model(directory: Path) -> None:
    """Save weights, a WordPiece vocabulary learnt from the texts, and the files of sentence-transformers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB_SIZE, hidden_size=384, intermediate_size=1536, num_attention_heads=12)
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, show_progress=False)
    tokenizer.train([str(path) for path in TEXTS], trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(directory)


def main() -> None:
    """Print both throughputs, their ratio, and the largest difference between the vectors' numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    texts = short_texts(arguments.texts)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        compare(Path(folder), texts, arguments.runs, arguments.threads)


def compare(directory: Path, texts: list[str], runs: int, threads: int) -> None:
    """Measure both programs in turns."""
    import sentence_transformers
    import torch

    from octavo import LLM

    torch.set_num_threads(threads)
    peer = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    with LLM(str(directory), num_threads=threads) as llm:
        num_tokens = sum(len(llm.encode(text)) for text in texts)
        programs: dict[str, Callable[[], np.ndarray]] = {
            "octavo": lambda: np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]),
            "sentence-transformers": lambda: peer.encode(texts, show_progress_bar=False),
        }
        vectors = {name: embed() for name, embed in programs.items()}  # also warms up
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        busy: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(runs):
            for name, embed in programs.items():
                began, began_busy = time.perf_counter(), time.process_time()
                embed()
                seconds[name].append(time.perf_counter() - began)
                busy[name].append(time.process_time() - began_busy)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    medians_busy = {name: statistics.median(values) for name, values in busy.items()}
    print(f"{len(texts)} texts, {num_tokens} tokens, {threads} threads")
    for name, median in medians.items():
        spread = f"{min(seconds[name]):.3f} to {max(seconds[name]):.3f}"
        print(
            f"{name}: {len(texts) / median:.0f} texts/s, {num_tokens / median:.0f} tokens/s ({spread} s), "
            f"{medians_busy[name]:.3f} processor seconds"
        )
    for what, values in (("time", medians), ("processor time", medians_busy)):
        print(f"ratio of {what}: {values['sentence-transformers'] / values['octavo']:.2f}")
    units = [vector / np.linalg.norm(vector, axis=1, keepdims=True) for vector in vectors.values()]
    print(f"largest difference {np.abs(units[0] - units[1]).max():.1e}")


if __name__ == "__main__":
    main()
