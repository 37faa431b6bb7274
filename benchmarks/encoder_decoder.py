"""Compare answers of a random encoder-decoder model with CTranslate2 in int8.

    python benchmarks/encoder_decoder.py [--size base] [--source 256] [--answer 64] [--texts 1 8] [--threads N]

The shapes are those of Flan-T5 small, base and large; the weights are random. CTranslate2 converts the same directory
to int8, Octavo loads it with `--quantization int8`. Both answer greedily, the given number of texts at once, in turns,
with a fixed number of tokens; the median of the runs counts. Each uses N threads, by default all processors of this
process. CTranslate2 must be importable: `pip install ctranslate2 --target FOLDER` and `PYTHONPATH=FOLDER`.
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

SIZES = {
    "small": {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "base": {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "large": {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16},
}
_VOCAB_SIZE = 32128
Answer = Callable[[list[list[int]]], list[list[int]]]


def save_model(size: str, directory: Path) -> None:
    """Save weights and a vocabulary of made-up words, which only names tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=_VOCAB_SIZE, d_kv=64, feed_forward_proj="gated-gelu", decoder_start_token_id=0, **SIZES[size]
    )
    T5ForConditionalGeneration(config).save_pretrained(directory)
    words = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(3, _VOCAB_SIZE))]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def ctranslate2_answers(directory: Path, count: int, threads: int) -> Answer:
    """Return the answers of the peer, converted to int8."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    converted = directory / "ctranslate2"
    TransformersConverter(str(directory)).convert(str(converted), quantization="int8")
    translator = ctranslate2.Translator(str(converted), device="cpu", inter_threads=1, intra_threads=threads)
    print(f"ctranslate2 {ctranslate2.__version__}, {translator.compute_type}")

    def answer(sources: list[list[int]]) -> list[list[int]]:
        results = translator.translate_batch(
            [[f"w{token}" for token in source] for source in sources],
            beam_size=1,
            min_decoding_length=count,
            max_decoding_length=count,
            max_batch_size=0,
        )
        return [[int(word[1:]) if word[0] == "w" else 0 for word in result.hypotheses[0]] for result in results]

    return answer


def main() -> None:
    """Print both programs' answer tokens per second, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--source", type=int, default=256)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.size, Path(folder))
        compare(Path(folder), arguments)


def compare(directory: Path, arguments: argparse.Namespace) -> None:
    """Measure both programs in turns."""
    from octavo import LLM, SamplingParams

    peer = ctranslate2_answers(directory, arguments.answer, arguments.threads)
    params = SamplingParams(max_tokens=arguments.answer, temperature=0, ignore_eos=True, detokenize=False)
    with LLM(
        str(directory), quantization="int8", num_threads=arguments.threads, max_num_seqs=max(arguments.texts)
    ) as llm:

        def own(sources: list[list[int]]) -> list[list[int]]:
            outputs = llm.generate([{"prompt_token_ids": source} for source in sources], params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        programs: dict[str, Answer] = {"octavo": own, "ctranslate2": peer}
        rng = np.random.default_rng(0)
        for count in arguments.texts:
            seconds: dict[str, list[float]] = {name: [] for name in programs}
            for run in range(arguments.runs + 1):
                # New texts: rows of an encoder are kept.
                sources = rng.integers(3, _VOCAB_SIZE, (count, arguments.source)).tolist()
                for name, answer in programs.items():
                    began = time.perf_counter()
                    found = answer(sources)
                    if run:  # the first warms up
                        seconds[name].append(time.perf_counter() - began)
                    assert all(len(tokens) == arguments.answer for tokens in found)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            for name, median in medians.items():
                spread = f"{min(seconds[name]):.3f} to {max(seconds[name]):.3f}"
                print(f"{count} texts, {name}: {count * arguments.answer / median:.1f} tokens/s ({spread} s)")
            print(f"{count} texts, ratio: {medians['ctranslate2'] / medians['octavo']:.2f}")


if __name__ == "__main__":
    main()
