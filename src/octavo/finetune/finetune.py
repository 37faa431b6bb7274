"""LoRA training of a checkpoint, from a file of examples to an adapter's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from octavo.backends.adapted_modules import AdaptedModule
from octavo.backends.memory import host_memory
from octavo.engine.loading.progress_bar import size
from octavo.errors import InsufficientMemoryError, UsageError
from octavo.finetune.adapter_folder import AdapterDescription, write_adapter
from octavo.finetune.examples import Examples, read_examples
from octavo.finetune.find_modules import ALL_LINEAR, find_modules
from octavo.finetune.memory import StepLoad, TrainingMemory, training_memory
from octavo.finetune.schedule import held_out_lines, plan_steps
from octavo.finetune.training_run import Plan, RunFolder, RunProgress, Watcher, run_steps
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import MoE
from octavo.loader.atomic_folder import AtomicFolder
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph
from octavo.tokenizer import load_tokenizer

_REMEDY = "training needs torch: pip install 'octavo[train]'"
_EVALUATIONS = 10  # on held-out texts in a run, where nothing else is asked for
FrozenWeights = Literal["auto", "kept", "stored"]


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """Options of a training run.

    alpha: None means twice the rank.
    learning_rate: the peak learning rate.
    batch_tokens: tokens per step.
    sequence_length: maximum tokens per example.
    held_out: fraction of the lines that is not trained on.
    held_out_every: steps between evaluations; 0 means ten evaluations in a run.
    frozen: whether frozen weights stay in memory as floats or are dequantized whenever needed.
    """

    rank: int = 16
    alpha: float | None = None
    learning_rate: float = 2e-4
    epochs: int = 3
    batch_tokens: int = 1024
    sequence_length: int = 1024
    held_out: float = 0.05
    held_out_every: int = 0
    seed: int = 0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    frozen: FrozenWeights = "auto"

    @property
    def scaled_by(self) -> float:
        """The alpha to use."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclass(frozen=True, slots=True)
class Finetuning:
    """A checkpoint, its examples, and the plan that follows from them and the options.

    base: the model's name in the adapter.
    """

    base: str
    checkpoint: Checkpoint
    graph: Graph
    modules: Sequence[AdaptedModule]
    examples: Examples
    plan: Plan
    options: FinetuneOptions

    def memory(self, *, product_bytes: int) -> tuple[TrainingMemory, bool]:
        """Return the memory the run needs, and whether frozen weights stay in memory.

        product_bytes: bytes of a number in a matrix product.

        Raises InsufficientMemoryError if the run needs more than is free.
        """
        load = StepLoad.of(self.plan.texts, self.plan.steps)
        free = host_memory().usable_bytes
        kept = training_memory(self.graph, self.modules, self.options.rank, load, product_bytes)
        stored = training_memory(self.graph, self.modules, self.options.rank, load, 0)
        keeps = self.options.frozen == "kept" or (self.options.frozen == "auto" and kept.total <= free)
        chosen = kept if keeps else stored
        if chosen.total > free:
            raise InsufficientMemoryError(
                f"training takes {size(chosen.total)} ({chosen}), but only {size(free)} is free; use a smaller "
                "--batch-tokens or --sequence-length" + (", or --frozen stored" if keeps else "")
            )
        return chosen, keeps


def open_finetuning(base: str, checkpoint: Checkpoint, data: Path, options: FinetuneOptions) -> Finetuning:
    """Read the data and plan the steps. Raises UsageError for data or options that do not fit the model."""
    length = min(options.sequence_length, checkpoint.config.max_position_embeddings)
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    if not graph.makes_logits:
        raise UsageError(f"{checkpoint.path}: this model generates no text; only models that do can be fine-tuned")
    modules = find_modules(checkpoint, graph, options.target_modules)
    examples = read_examples(data, load_tokenizer(checkpoint), length)
    held_out = held_out_lines(examples.lines, options.held_out, options.seed)
    parts: tuple[list[Any], list[Any]] = ([], [])
    for line, text in zip(examples.lines, examples.texts, strict=True):
        parts[line in held_out].append(text)
    steps = plan_steps([len(text.ids) for text in parts[0]], options.batch_tokens, options.epochs, options.seed)
    every = options.held_out_every or max(len(steps) // _EVALUATIONS, 1)
    plan = Plan(*parts, steps, options.learning_rate, options.batch_tokens, every)
    return Finetuning(base, checkpoint, graph, modules, examples, plan, options)


@dataclass(frozen=True, slots=True)
class Finetuned:
    """The result of a run.

    nbytes: size of the adapter's tensors; 0 if the run was stopped.
    num_tokens: tokens trained on by this process.
    """

    progress: RunProgress
    nbytes: int
    num_tokens: int


@contextmanager
def run_folder(adapter: Path, *, restart: bool) -> Iterator[AtomicFolder]:
    """Open the folder of an unfinished run next to the adapter.

    It becomes the adapter's folder when the run is complete.

    The folder is kept after an exception. Raises ModelWriteError if another process is using it.
    """
    with AtomicFolder(adapter) as folder:
        if restart:
            folder.clear()
        yield folder


def finetune(
    work: Finetuning, folder: AtomicFolder, announce: Callable[[str, int], None], watcher: Watcher
) -> Finetuned:
    """Start or resume training, and write the adapter.

    announce: called before the first step, with a sentence about the memory and the number of steps that an earlier
        process has done.

    Raises UsageError if torch is missing, InsufficientMemoryError, and the errors of `run_steps`.
    """
    training = _training()
    run = RunFolder(folder.partial)
    noted = run.begin(_noted(work, "bfloat16" if training.bfloat16_is_faster() else "float32"))
    product_type = noted["_product_type"]
    memory, keeps = work.memory(product_bytes=2 if product_type == "bfloat16" else 4)
    scale = work.options.scaled_by / work.options.rank
    settings = training.LowRankOptions(work.options.rank, scale, product_type, keeps, seed=work.options.seed)
    progress, state = run.load()
    before = progress.steps
    announce(f"products in {product_type}; memory: {memory}", before)
    trainer = training.LowRankTrainer(work.graph, work.checkpoint.weights, work.modules, settings)
    if state:
        trainer.restore(state)
    nbytes = 0
    if run_steps(trainer, work.plan, run, progress, watcher):
        has_experts = any(isinstance(node.op, MoE) for node in work.graph.nodes)
        description = AdapterDescription(
            work.base, work.options.rank, work.options.scaled_by, work.modules, names_are_whole=has_experts
        )
        nbytes = write_adapter(folder.partial, description, trainer.factors())
        folder.publish()
        for path in folder.path.iterdir():  # not before: a run that ends here is complete
            if path.name not in (CONFIG_NAME, WEIGHTS_NAME):
                path.unlink()
    return Finetuned(progress, nbytes, work.plan.num_tokens(before, progress.steps))


def _noted(work: Finetuning, product_type: str) -> dict[str, Any]:
    """Return the options and digests that identify a run. The run can be resumed only with the same ones.

    A resumed run keeps the product type that its first process chose, because the choice depends on timings that vary.
    """
    options = asdict(work.options)
    for name in ("frozen", "held_out_every"):
        del options[name]
    return {
        "model": work.checkpoint.file.digest(),
        "data": work.examples.digest,
        **options,
        "alpha": work.options.scaled_by,
        "target_modules": list(work.options.target_modules),
        "_product_type": product_type,
    }


def _training() -> Any:
    """Import the module that needs torch. Raises UsageError with the remedy."""
    try:
        from octavo.backends.torch import low_rank_training
    except ImportError as error:
        raise UsageError(_REMEDY) from error
    return low_rank_training
