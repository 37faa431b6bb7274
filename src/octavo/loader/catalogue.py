"""Short names of hub models, by family and size, as shown by `octavo list --all`.

A name is `family:size`, optionally with a type: `qwen3:4b:q8_0` (or `qwen3:4b-q8_0`). The family alone means its first
size. Each repository was found by this name in public source code. Files and checksums are not listed here: both are
taken from the hub at the first download and recorded (`octavo.loader.library`). From the recorded headers of each
entry, a test checks that Octavo can load the model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_TYPE = re.compile(r"(iq|q|tq|f|bf|mxfp)[0-9][a-z0-9_]*", re.ASCII)

# Family -> size -> repository with GGUF files.
FAMILIES: dict[str, dict[str, str]] = {
    "smollm2": {
        "360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
    },
    "smollm3": {"3b": "ggml-org/SmolLM3-3B-GGUF"},
    "qwen3": {
        "4b": "Qwen/Qwen3-4B-GGUF",
        "0.6b": "Qwen/Qwen3-0.6B-GGUF",
        "1.7b": "Qwen/Qwen3-1.7B-GGUF",
        "8b": "Qwen/Qwen3-8B-GGUF",
        "14b": "Qwen/Qwen3-14B-GGUF",
        "32b": "Qwen/Qwen3-32B-GGUF",
        "30b": "Qwen/Qwen3-30B-A3B-GGUF",
    },
    "qwen3-instruct": {"4b": "unsloth/Qwen3-4B-Instruct-2507-GGUF"},
    "qwen3-vl": {
        "4b": "Qwen/Qwen3-VL-4B-Instruct-GGUF",
        "2b": "Qwen/Qwen3-VL-2B-Instruct-GGUF",
        "8b": "Qwen/Qwen3-VL-8B-Instruct-GGUF",
        "32b": "Qwen/Qwen3-VL-32B-Instruct-GGUF",
        "30b": "Qwen/Qwen3-VL-30B-A3B-Instruct-GGUF",
    },
    "qwen3-embedding": {"0.6b": "Qwen/Qwen3-Embedding-0.6B-GGUF"},
    "qwen2.5": {
        "7b": "bartowski/Qwen2.5-7B-Instruct-GGUF",
        "0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        "1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        "3b": "Qwen/Qwen2.5-3B-Instruct-GGUF",
        "14b": "bartowski/Qwen2.5-14B-Instruct-GGUF",
    },
    "qwen2.5-coder": {
        "7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
        "0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF",
    },
    "llama3.1": {"8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"},
    "llama3.2": {
        "3b": "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    },
    "llama3.3": {"70b": "bartowski/Llama-3.3-70B-Instruct-GGUF"},
    "gemma3": {
        "4b": "ggml-org/gemma-3-4b-it-GGUF",
        "270m": "ggml-org/gemma-3-270m-it-GGUF",
        "1b": "ggml-org/gemma-3-1b-it-GGUF",
        "12b": "ggml-org/gemma-3-12b-it-GGUF",
    },
    "gemma4": {
        "e4b": "unsloth/gemma-4-E4B-it-GGUF",
        "e2b": "unsloth/gemma-4-E2B-it-GGUF",
    },
    "gemma2": {
        "9b": "bartowski/gemma-2-9b-it-GGUF",
        "2b": "bartowski/gemma-2-2b-it-GGUF",
        "27b": "bartowski/gemma-2-27b-it-GGUF",
    },
    "phi4": {"14b": "bartowski/phi-4-GGUF"},
    "phi4-mini": {"3.8b": "unsloth/Phi-4-mini-instruct-GGUF"},
    "phi3.5": {"3.8b": "bartowski/Phi-3.5-mini-instruct-GGUF"},
    "phi3": {"3.8b": "microsoft/Phi-3-mini-4k-instruct-gguf"},
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF"},
    "ministral3": {
        "8b": "mistralai/Ministral-3-8B-Instruct-2512-GGUF",
        "3b": "mistralai/Ministral-3-3B-Instruct-2512-GGUF",
    },
    "mistral-nemo": {"12b": "bartowski/Mistral-Nemo-Instruct-2407-GGUF"},
    "mistral-small": {"24b": "bartowski/Mistral-Small-24B-Instruct-2501-GGUF"},
    "mixtral": {"8x7b": "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF"},
    "granite3.3": {
        "8b": "ibm-granite/granite-3.3-8b-instruct-GGUF",
        "2b": "ibm-granite/granite-3.3-2b-instruct-GGUF",
    },
    "deepseek-r1": {
        "7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
        "1.5b": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF",
        "8b": "bartowski/DeepSeek-R1-Distill-Llama-8B-GGUF",
    },
    "tinyllama": {"1.1b": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF"},
    "olmo2": {"1b": "allenai/OLMo-2-0425-1B-Instruct-GGUF"},
    "lfm2": {
        "1.2b": "LiquidAI/LFM2-1.2B-GGUF",
        "350m": "LiquidAI/LFM2-350M-GGUF",
        "700m": "LiquidAI/LFM2-700M-GGUF",
        "8b": "LiquidAI/LFM2-8B-A1B-GGUF",
    },
    "gpt-oss": {
        "20b": "ggml-org/gpt-oss-20b-GGUF",
        "120b": "ggml-org/gpt-oss-120b-GGUF",
    },
    "exaone4": {"1.2b": "LGAI-EXAONE/EXAONE-4.0-1.2B-GGUF"},
    "nomic-embed": {"137m": "nomic-ai/nomic-embed-text-v1.5-GGUF"},
    "bge-small": {"33m": "CompendiumLabs/bge-small-en-v1.5-gguf"},
    "bge-base": {"109m": "CompendiumLabs/bge-base-en-v1.5-gguf"},
    "bge-m3": {"567m": "gpustack/bge-m3-GGUF"},
    "bge-large": {"335m": "CompendiumLabs/bge-large-en-v1.5-gguf"},
    "bge-reranker": {"568m": "gpustack/bge-reranker-v2-m3-GGUF"},
    "embeddinggemma": {"300m": "ggml-org/embeddinggemma-300M-GGUF"},
    "mxbai-embed-large": {"335m": "ChristianAzinn/mxbai-embed-large-v1-gguf"},
    "all-minilm": {"22m": "second-state/All-MiniLM-L6-v2-Embedding-GGUF"},
    "granite4": {
        "7b": "ibm-granite/granite-4.0-h-tiny-GGUF",
        "32b": "ibm-granite/granite-4.0-h-small-GGUF",
    },
    "gemma3n": {"e2b": "ggml-org/gemma-3n-E2B-it-GGUF"},
    "qwen3-coder": {"30b": "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF"},
    "qwen3-next": {"80b": "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF"},
    "qwen3.5": {
        "4b": "unsloth/Qwen3.5-4B-GGUF",
        "0.8b": "unsloth/Qwen3.5-0.8B-GGUF",
        "9b": "unsloth/Qwen3.5-9B-GGUF",
        "35b": "unsloth/Qwen3.5-35B-A3B-GGUF",
    },
    "command-r7b": {"7b": "bartowski/c4ai-command-r7b-12-2024-GGUF"},
    "command-r": {"35b": "bartowski/c4ai-command-r-08-2024-GGUF"},
    "falcon-h1": {"0.5b": "tiiuae/Falcon-H1-0.5B-Instruct-GGUF"},
    "glm4": {"9b": "bartowski/THUDM_GLM-4-9B-0414-GGUF"},
    "deepseek-coder-v2": {"16b": "bartowski/DeepSeek-Coder-V2-Lite-Instruct-GGUF"},
    "exaone3.5": {"2.4b": "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct-GGUF"},
    "internlm2": {"7b": "internlm/internlm2_5-7b-chat-gguf"},
    "olmo3": {"7b": "unsloth/Olmo-3-7B-Instruct-GGUF"},
    "ernie4.5": {
        "0.3b": "unsloth/ERNIE-4.5-0.3B-PT-GGUF",
        "21b": "unsloth/ERNIE-4.5-21B-A3B-PT-GGUF",
    },
    "hunyuan": {"80b": "unsloth/Hunyuan-A13B-Instruct-GGUF"},
    "seed-oss": {"36b": "unsloth/Seed-OSS-36B-Instruct-GGUF"},
    "minicpm3": {"4b": "openbmb/MiniCPM3-4B-GGUF"},
    "jamba-reasoning": {"3b": "ai21labs/AI21-Jamba-Reasoning-3B-GGUF"},
    "starcoder2": {"3b": "second-state/StarCoder2-3B-GGUF"},
    "devstral": {"24b": "mistralai/Devstral-Small-2505_gguf"},
    "apertus": {"8b": "unsloth/Apertus-8B-Instruct-2509-GGUF"},
    "glm4.5-air": {"106b": "unsloth/GLM-4.5-Air-GGUF"},
    "llama4-scout": {"109b": "unsloth/Llama-4-Scout-17B-16E-Instruct-GGUF"},
    "step3.5-flash": {"196b": "ggml-org/Step-3.5-Flash-GGUF"},
    "minimax-m2": {"230b": "unsloth/MiniMax-M2-GGUF"},
    "magistral": {"24b": "unsloth/Magistral-Small-2506-GGUF"},
}


# Model -> small model with the same vocabulary that guesses its tokens cheaply enough to save time.
DRAFTS: dict[str, str] = {
    **{f"qwen3:{size}": "qwen3:0.6b" for size in ("4b", "8b", "14b", "32b", "30b")},
    **{f"qwen2.5:{size}": "qwen2.5:0.5b" for size in ("1.5b", "3b", "7b", "14b")},
    **{f"qwen2.5-coder:{size}": "qwen2.5-coder:0.5b" for size in ("1.5b", "3b", "7b")},
    **dict.fromkeys(("llama3.2:3b", "llama3.1:8b", "llama3.3:70b"), "llama3.2:1b"),
    "smollm2:1.7b": "smollm2:360m",
    "granite3.3:8b": "granite3.3:2b",
}


def draft_for(model: str) -> str | None:
    """Return the draft model for a short name, or for a repository or file of the catalogue, or None if none is
    known.
    """
    name, repositories = model.lower(), catalogue()
    for target, draft in DRAFTS.items():
        repository = repositories[target]
        stem = repository.partition("/")[2].lower().removesuffix("-gguf")
        is_file = name.rpartition("/")[2].startswith((f"{stem}.", f"{stem}-q", f"{stem}-f", f"{stem}-i", f"{stem}-b"))
        if is_file or name == target or name.startswith((f"{target}:", f"{target}-q", repository.lower())):
            return draft
    return None


def catalogue() -> dict[str, str]:
    """Return the repository of every short name `family:size`."""
    return {f"{family}:{size}": repo for family, sizes in FAMILIES.items() for size, repo in sizes.items()}


def find(name: str) -> tuple[str, str | None] | None:
    """Return the repository and the type (`Q8_0`) that a short name means, or None if it is not in the catalogue."""
    name = _WITH_DASH.get(name.lower(), name.lower())
    family, _, tag = name.partition(":")
    sizes = FAMILIES.get(family)
    if sizes is None:
        return None
    size, *rest = re.split("[:-]", tag, maxsplit=1)
    if not rest and _TYPE.fullmatch(size):  # qwen3:q8_0
        size, rest = "", [size]
    repository = sizes[next(iter(sizes))] if size in ("", "latest") else sizes.get(size)
    if repository is None or not all(map(_TYPE.fullmatch, rest)):
        return None
    return repository, rest[0].upper() if rest else None


def nearest(name: str, also: Iterable[str] = (), likeness: float = 0.6) -> str | None:
    """Return the short name that a misspelled one probably means.

    likeness: required similarity of the two, from 0 to 1.
    """
    matcher = difflib.SequenceMatcher(b=name.lower())
    best, best_name = likeness, None
    for known in (*also, *FAMILIES, *catalogue()):  # among equally similar names, the first
        matcher.set_seq1(known)
        if matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, best_name = ratio, known
    return best_name


_WITH_DASH = {name.replace(":", "-"): name for name in catalogue()}
