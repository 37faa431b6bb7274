"""`octavo distill`: train a student model to imitate its teacher."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from octavo.cli.completion import complete_model
from octavo.cli.quantize import check_destination, float_type, tokens_of
from octavo.cli.terminal import find_model, write
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError


@click.command()
@click.argument("teacher", shell_complete=complete_model, metavar="TEACHER")
@click.argument("student", shell_complete=complete_model, metavar="STUDENT")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    metavar="TEXT",
    help="UTF-8 text to train on",
)
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=20.0, show_default=True, help="training time"
)
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True, help="maximum number of steps")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="text pieces per step")
@click.option("--length", type=click.IntRange(2), default=256, show_default=True, help="tokens per piece")
@click.option(
    "--max-pieces",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="maximum number of pieces, spread over the text",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=1e-4, show_default=True, help="learning rate")
@click.option(
    "--divergence",
    type=click.Choice(["forward", "reverse"]),
    default="forward",
    show_default=True,
    help="forward: KL(teacher || student); reverse: KL(student || teacher)",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="softmax temperature of both models; unless it is 1, only the teacher's top tokens count",
)
@click.option(
    "--top-k", type=click.IntRange(2), default=64, show_default=True, help="top tokens of the teacher to keep"
)
@float_type
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="seed for the order of the pieces")
@click.option("--force", is_flag=True, help="replace DST if it exists")
def distill(**options: Any) -> None:
    """Train STUDENT to imitate TEACHER; DST is a GGUF file.

    Both models need the same vocabulary. All weights of the student are trained, on the CPU, with bfloat16 products
    where that is faster. The teacher's top tokens are computed once per text and cached. Needs torch: pip install
    'octavo[train]'.
    """
    from octavo import env
    from octavo.compress.distill import TeacherCache, check_vocabularies, distilled, training_options, training_texts
    from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture, quantize_model
    from octavo.compress.source import as_source, open_source
    from octavo.loader.atomic_file import check_free_space
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.loader.finite_weights import check_weights

    destination: Path = options["destination"]
    teacher_path, student_path = (find_model(options[name], {})[0] for name in ("teacher", "student"))
    wanted = training_options(
        steps=options["steps"],
        batch=options["batch"],
        rate=options["rate"],
        seconds=60 * options["minutes"],
        divergence=options["divergence"],
        temperature=options["temperature"],
        seed=options["seed"],
    )
    mixture = parse_mixture(options["dtype"])
    losses: list[float] = []
    with open_source(student_path) as source, ProgressBar(announced=True) as bar:
        check_destination(source.path, destination, options["force"])
        expected = choose_types(source, mixture, TypeOptions())  # the student keeps its shapes
        check_free_space(destination.parent, sum(choice.nbytes for choice in expected))
        with closing(open_checkpoint(teacher_path)) as teacher:
            check_destination(teacher.path, destination, options["force"])
            with closing(open_checkpoint(student_path)) as student:
                check_vocabularies(teacher, student)
            for path in (teacher_path, student_path):
                check_weights(str(path))
            ids, first = tokens_of(teacher, options["data"])
            texts = training_texts(ids, options["length"], first, options["max_pieces"])
            cache = TeacherCache(env.cache_dir() / "teachers", options["top_k"])
            tokens = cache.tokens(teacher, texts, lambda done, total: bar.update("reading the teacher", done, total))

        def report(share: float, loss: float) -> None:
            losses.append(loss)
            bar.update("training, per mille", min(round(1000 * share), 1000), 1000)

        with closing(open_checkpoint(student_path)) as student:
            sources = distilled(tokens, student, source.architecture, wanted, report)
            if not losses:
                raise UsageError(
                    "--minutes ran out before the first step; nothing was trained; raise it", param="minutes"
                )
            model = as_source(source.path, source.metadata, student.file, sources)
            quantize_model(model, destination, choose_types(model, mixture, TypeOptions()), mixture.file_type)
    tail = losses[-max(len(losses) // 10, 1) :]
    write(
        f"{len(losses)} steps, products in {'bfloat16' if wanted.in_bfloat16 else 'float32'}; "
        f"loss {losses[0]:.4f} at first, {sum(tail) / len(tail):.4f} at the end, in nats per token\n"
    )
