"""Train a small model that sees on drawn pictures, then ask it about new ones in transformers and in Octavo.

    python examples/train_seeing_model.py FOLDER [--family qwen3_vl|idefics3] [--steps N]

A picture has a digit in one of its cells and one to three equal shapes in other cells. The right answer describes all
of this in words: ` two red pyramid 7 bottom left`. A picture that is rotated, mirrored or cropped wrongly, or whose
colours or parts are in the wrong order, therefore gets a wrong answer. The model is saved to FOLDER in the format of
transformers. The script fails if fewer than --least of the answers about new pictures are right, in transformers or in
Octavo, if the two differ, or if most of the pictures altered on purpose still get the old answers. Needs torch and
transformers: pip install 'octavo[vision,test]'. Training takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.idefics3.configuration_idefics3 import Idefics3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

CELL = 32  # pixels per side
QUESTION = "What?"
ANSWER_TOKENS = 7  # six words and an end token
LEARNING_RATE = 3e-3
COUNTS = ("one", "two", "three")
COLOURS = {"red": (220, 30, 30), "green": (20, 160, 40), "blue": (30, 50, 220), "yellow": (230, 200, 20)}
# Corners, in units of half a side. A pyramid upside down is a funnel.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "pyramid": ((-1, 1), (0, -1), (1, 1)),
    "funnel": ((-1, -1), (1, -1), (0, 1)),
    "circle": (),
}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
# 3 x 5 pixels, one octal digit per row. Except for 6 and 9, and 2 and 5, no digit is another one rotated or mirrored.
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717")
WORDS = [*COUNTS, *COLOURS, *SHAPES, *"0123456789", *ROWS, *COLUMNS]
SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
TEMPLATE = """{%% for m in messages %%}<|im_start|>{%% if m.content is string %%}{{ m.content }}{%% else %%}\
{%% for part in m.content %%}{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}{%% endfor %%}\
{%% endif %%}<|im_end|>{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>{%% endif %%}"""


@dataclass(frozen=True)
class Drawing:
    picture: Image.Image
    answer: str


def drawing(rng: np.random.Generator, grid: tuple[int, int]) -> Drawing:
    """Draw a picture of `grid` cells (rows, columns) and return it with the right answer."""
    rows, columns = grid
    background = int(rng.integers(200, 256))
    picture = Image.new("RGB", (columns * CELL, rows * CELL), (background, background, background))
    cells = rng.permutation(rows * columns)
    count = int(rng.integers(1, min(len(COUNTS), len(cells) - 1) + 1))
    colour, shape = rng.choice(list(COLOURS)), rng.choice(list(SHAPES))
    digit = int(rng.integers(10))
    for cell in cells[1 : count + 1]:
        draw_shape(picture, place(rng, int(cell), columns), int(rng.integers(8, 12)), COLOURS[colour], SHAPES[shape])
    draw_digit(picture, place(rng, int(cells[0]), columns), digit)
    row, column = divmod(int(cells[0]), columns)
    where = f"{ROWS[row * 2 // max(rows - 1, 1)]} {COLUMNS[column * 2 // max(columns - 1, 1)]}"
    return Drawing(picture, f" {COUNTS[count - 1]} {colour} {shape} {digit} {where}")


def place(rng: np.random.Generator, cell: int, columns: int) -> tuple[int, int]:
    """Return (x, y), a point near the middle of the cell, where its content is centred."""
    row, column = divmod(cell, columns)
    x, y = rng.integers(-2, 3, 2)
    return column * CELL + CELL // 2 + int(x), row * CELL + CELL // 2 + int(y)


def draw_shape(
    picture: Image.Image,
    at: tuple[int, int],
    half: int,
    colour: tuple[int, int, int],
    corners: tuple[tuple[int, int], ...],
) -> None:
    x, y = at
    if corners:
        ImageDraw.Draw(picture).polygon([(x + half * a, y + half * b) for a, b in corners], fill=colour)
    else:
        ImageDraw.Draw(picture).ellipse((x - half, y - half, x + half, y + half), fill=colour)


def draw_digit(picture: Image.Image, at: tuple[int, int], digit: int, size: int = 4) -> None:
    x, y = at[0] - 3 * size // 2, at[1] - 5 * size // 2
    for row, bits in enumerate(DIGITS[digit]):
        for column in range(3):
            if int(bits) & (4 >> column):
                left, top = x + size * column, y + size * row
                ImageDraw.Draw(picture).rectangle((left, top, left + size - 1, top + size - 1), fill=(0, 0, 0))


_TEXT = {
    **{"vocab_size": len(SPECIALS) + 256 + len(WORDS), "hidden_size": 96, "intermediate_size": 256},
    **{"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32},
    **{"max_position_embeddings": 512, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class Family:
    """A model family.

    grids: sizes of its pictures, in cells.
    placeholder: text that its chat template writes for an image; it contains `image_token`.
    image_text: takes the processed pictures and returns the text that replaces `image_token` for the first picture.
    """

    grids: tuple[tuple[int, int], ...]
    placeholder: str
    image_token: str
    preprocessor: dict[str, Any]
    processor: Callable[..., Any]
    processor_options: dict[str, Any]
    image_text: Callable[[Any], str]
    config: Callable[[], PreTrainedConfig]


def qwen3_vl_config() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    vision = {"depth": 3, "hidden_size": 96, "intermediate_size": 256, "num_heads": 3, "patch_size": 8}
    return Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": 96, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        image_token_id=SPECIALS.index("<|image_pad|>"),
        vision_start_token_id=SPECIALS.index("<|vision_start|>"),
        vision_end_token_id=SPECIALS.index("<|vision_end|>"),
    )


def idefics3_config() -> PreTrainedConfig:
    vision = {"num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3}
    return Idefics3Config(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={**vision, "patch_size": 8, "image_size": CELL},
        scale_factor=2,
        image_token_id=SPECIALS.index("<image>"),
    )


_IDEFICS: Any = SimpleNamespace(  # attributes of its processor, which itself would need a transformers tokenizer
    fake_image_token="<fake_token_around_image>",
    global_image_tag="<global-img>",
    image_token="<image>",
    image_seq_len=4,
)
FAMILIES = {
    "qwen3_vl": Family(
        grids=((2, 2), (2, 3), (3, 2)),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        preprocessor={
            **{"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1 << 16}},
            **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
        processor=Qwen2VLImageProcessorPil,
        processor_options={},
        image_text=lambda found: "<|image_pad|>" * (int(found["image_grid_thw"][0].prod()) // 4),
        config=qwen3_vl_config,
    ),
    "idefics3": Family(
        grids=((2, 2),),
        placeholder="<image>",
        image_token="<image>",
        preprocessor={"max_image_size": {"longest_edge": CELL}, "size": {"longest_edge": 2 * CELL}},
        processor=Idefics3ImageProcessorPil,
        processor_options={"return_row_col_info": True},
        image_text=lambda found: Idefics3Processor.replace_image_token(_IDEFICS, found, 0),
        config=idefics3_config,
    ),
}


def tokenizer() -> Tokenizer:
    """Create a tokenizer whose tokens are single bytes, words of answers and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIALS, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIALS)
    made.add_tokens([AddedToken(f" {word}", normalized=False) for word in WORDS])
    return made


class Task:
    """Pictures in the form that a model family takes."""

    def __init__(self, name: str) -> None:
        self.family = FAMILIES[name]
        self.tokenizer = tokenizer()
        self.processor = self.family.processor(**self.family.preprocessor)

    def inputs(self, pictures: list[Image.Image]) -> dict[str, torch.Tensor]:
        """Return the model inputs for questions about pictures of one size."""
        found = self.processor(
            images=[[each] for each in pictures], return_tensors="pt", **self.family.processor_options
        )
        image = self.family.placeholder.replace(self.family.image_token, self.family.image_text(found))
        ids = self.tokenizer.encode(f"<|im_start|>{image}{QUESTION}<|im_end|><|im_start|>").ids
        inputs = {key: torch.as_tensor(found[key]) for key in ("pixel_values", "image_grid_thw") if key in found}
        inputs["input_ids"] = torch.tensor([ids] * len(pictures))
        if "image_grid_thw" in found:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == SPECIALS.index(self.family.image_token)).int()
        return inputs

    def batches(self, count: int, size: int, seed: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield `count` batches of `size` pictures, with the tokens of their answers [size, ANSWER_TOKENS]."""
        rng = np.random.default_rng(seed)
        for i in range(count):
            drawings = [drawing(rng, self.family.grids[i % len(self.family.grids)]) for _ in range(size)]
            answers = [self.tokenizer.encode(each.answer + "<|im_end|>").ids for each in drawings]
            yield self.inputs([each.picture for each in drawings]), torch.tensor(answers)


def with_answers(inputs: dict[str, torch.Tensor], answers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Append the first tokens of answers to the questions."""
    more = {"input_ids": torch.cat((inputs["input_ids"], answers), 1)}
    if "mm_token_type_ids" in inputs:
        more["mm_token_type_ids"] = torch.cat((inputs["mm_token_type_ids"], torch.zeros_like(answers).int()), 1)
    return {**inputs, **more}


def train(task: Task, steps: int, batch: int, seed: int = 0) -> PreTrainedModel:
    """Train a new model for `steps` batches."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
        task.family.config(), dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    began = time.monotonic()
    for step, (inputs, answers) in enumerate(task.batches(steps, batch, seed + 1), 1):
        logits = model(**with_answers(inputs, answers[:, :-1]), logits_to_keep=ANSWER_TOKENS).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            right = (logits.argmax(-1) == answers).float().mean()
            print(f"step {step}: loss {loss:.3f}, {right:.1%} of tokens, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save(model: PreTrainedModel, task: Task, folder: Path) -> None:
    """Save the model and everything else that a loader reads."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(task.family.preprocessor))
    (folder / "tokenizer.json").write_text(task.tokenizer.to_str())
    names = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE % task.family.placeholder,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def held_out(task: Task, count: int) -> list[Drawing]:
    """Draw pictures that the model was not trained on."""
    rng = np.random.default_rng(987654321)
    return [drawing(rng, task.family.grids[i % len(task.family.grids)]) for i in range(count)]


def answers_of_transformers(model: PreTrainedModel, task: Task, drawings: list[Drawing]) -> list[str]:
    found = []
    with torch.inference_mode():
        for each in drawings:
            inputs, answer = task.inputs([each.picture]), torch.zeros((1, 0), dtype=torch.long)
            for _ in range(ANSWER_TOKENS):
                logits = model(**with_answers(inputs, answer), logits_to_keep=1).logits
                answer = torch.cat((answer, logits[:, -1].argmax(-1)[:, None]), 1)
            found.append(task.tokenizer.decode(answer[0].tolist()))
    return found


def answers_of_octavo(folder: Path, drawings: list[Drawing], **options: Any) -> list[str]:
    from octavo import LLM, SamplingParams

    def conversation(picture: Image.Image) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
        return [{"role": "user", "content": parts}]

    with LLM(str(folder), max_num_seqs=8, **options) as llm:
        conversations = [conversation(each.picture) for each in drawings]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True))
    return [output.outputs[0].text for output in outputs]


def share_of_right(answers: list[str], drawings: list[Drawing]) -> float:
    """Return the share of answers that are right as a whole."""
    return sum(answer.strip() == each.answer.strip() for answer, each in zip(answers, drawings, strict=True)) / len(
        drawings
    )


def changed(drawings: list[Drawing], change: Callable[[Image.Image], Image.Image]) -> list[Drawing]:
    """Return altered pictures with the original answers."""
    return [Drawing(change(each.picture), each.answer) for each in drawings]


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "upside down": lambda picture: picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    "mirrored": lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "blue before red": lambda picture: Image.merge("RGB", picture.split()[::-1]),
    "halves in another order": lambda picture: Image.fromarray(np.roll(np.asarray(picture), picture.width // 2, 1)),
    "cut": lambda picture: picture.crop((CELL // 2, CELL // 2, picture.width, picture.height)).resize(picture.size),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32, help="pictures per step (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=200, help="number of new pictures (default: %(default)s)")
    parser.add_argument(
        "--least", type=float, default=0.95, help="required share of right answers (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    task = Task(given.family)
    model = train(task, given.steps, given.batch)
    save(model, task, given.folder)
    drawings = held_out(task, given.pictures)
    judged = answers_of_transformers(model, task, drawings)
    found = answers_of_octavo(given.folder, drawings)
    shares = [share_of_right(answers, drawings) for answers in (judged, found)]
    print(f"right answers about {len(drawings)} new pictures: transformers {shares[0]:.1%}, Octavo {shares[1]:.1%}")
    if min(shares) < given.least or [a.strip() for a in judged] != [a.strip() for a in found]:
        raise SystemExit("too few answers are right, or transformers and Octavo differ")
    for name, change in CHANGES.items():
        answers = answers_of_octavo(given.folder, changed(drawings, change))
        share = share_of_right(answers, drawings)
        print(f"unchanged answers about altered pictures ({name}): {share:.1%}")
        if share > 0.5:  # some colours and places are still right
            raise SystemExit("this test would not reveal an error in reading pictures")


if __name__ == "__main__":
    main()
