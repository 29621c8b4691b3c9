"""`bayplan forecast` on the command line: its options, and what they mean to the question that is asked."""

from __future__ import annotations

from typing import Any

import click

_MOST_NUMBER = 1 << 24
"""Of ranks, microbatches, tokens: what is far above any run, and still far from what memory holds."""


class _Numbers(click.ParamType[tuple[int, ...]]):
    """One whole number or several with commas between them."""

    name = "numbers"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(dict.fromkeys(int(number) for number in str(value).split(",")))
        except ValueError:
            self.fail(f"found {value!r}, expected whole numbers with commas between them, as in 64,512", param, ctx)
        if min(found) < 1:
            self.fail(f"found {min(found)}, expected at least 1", param, ctx)
        if max(found) > _MOST_NUMBER:
            self.fail(f"found {max(found)}, expected at most {_MOST_NUMBER:,}", param, ctx)
        return found


_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("dataset_url", metavar="DATASET")
@click.option("--profile", help="Which profile; needed where the dataset has several.")
@click.option("--dp", "num_ranks", type=_Numbers(), required=True, help="Data-parallel ranks.")
@click.option("--microbatches", type=_Numbers(), required=True, help="Packs of each rank in a global batch.")
@click.option("--sequence-length", type=_Numbers(), help="Tokens of a pack; default: those that the profile names.")
@click.option("--expert-parallel", type=_POSITIVE, help="So many consecutive data-parallel ranks form an expert group.")
@click.option(
    "--synchronises",
    type=click.Choice(["batch", "microbatch"]),
    default="batch",
    show_default=True,
    help="Where all ranks meet: microbatch for FSDP and ZeRO-3.",
)
@click.option(
    "--gpus-per-node",
    type=_POSITIVE,
    default=8,
    show_default=True,
    help="Consecutive data-parallel ranks on one machine; fewer than its GPUs where these share a pack.",
)
@click.option("--cost", help="ENCODER+LLM, or a file, as docs/cost.md says; default: by the profile's image rule.")
@click.option("--max-images-per-pack", type=_POSITIVE, help="As the loader's setting of that name.")
@click.option("--max-patches-per-pack", type=_POSITIVE, help="As the loader's setting of that name.")
@click.option("--alignment", type=_POSITIVE, default=1, show_default=True, help="Samples are padded to a multiple of it.")
@click.option("--buffer-size", type=_POSITIVE, default=2000, show_default=True, help="Samples a loader worker chooses from.")
@click.option("--batches", type=_POSITIVE, default=5, show_default=True, help="Independent global batches to look at.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other samples.")
@click.option("--json", "json_file", metavar="FILE", help="Write everything as JSON into FILE; - for stdout, without tables.")
def forecast(
    dataset_url: str,
    profile: str | None,
    num_ranks: tuple[int, ...],
    microbatches: tuple[int, ...],
    sequence_length: tuple[int, ...] | None,
    expert_parallel: int | None,
    synchronises: Any,
    gpus_per_node: int,
    cost: str | None,
    max_images_per_pack: int | None,
    max_patches_per_pack: int | None,
    alignment: int,
    buffer_size: int,
    batches: int,
    seed: int,
    json_file: str | None,
) -> None:
    """Predict from the index of DATASET how full packs get, how long ranks wait for each other, and what balancing gains.

    Lists of numbers give a table of all their combinations. No record and no image is read.

    Example: bayplan forecast demo-dataset --profile qwen25vl --dp 8 --microbatches 8 --sequence-length 4096
    """
    from pipelines.forecast import Question
    from pipelines.forecast import forecast as run_forecast
    from pipelines.forecast_text import write_forecast

    question = Question(
        num_ranks=num_ranks,
        num_microbatches=microbatches,
        sequence_lengths=sequence_length or (),
        expert_parallel=expert_parallel,
        synchronises=synchronises,
        ranks_per_node=gpus_per_node,
        cost=cost,
        alignment=alignment,
        max_images_per_pack=max_images_per_pack,
        max_patches_per_pack=max_patches_per_pack,
        buffer_size=buffer_size,
        num_batches=batches,
        seed=seed,
    )
    document = run_forecast(dataset_url, profile, question, lambda line: click.echo(line, err=True))
    write_forecast(document, json_file)
