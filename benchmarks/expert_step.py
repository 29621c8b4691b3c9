"""Step time of expert-parallel training on image-skewed packs: as they come, in each rank's own order, dealt; and its forecast.

    PYTHONPATH=. python benchmarks/expert_step.py [--steps 6] [--rounds 2] [--scratch FOLDER]

Four gloo ranks, each with a real loader. COMPUTE IS SIMULATED: a rank sleeps for what the cost model says of its pack's encoder
work, and meets the ranks of its expert group in an all-reduce; then the same for the language model, for each microbatch. What is
measured is who waits for whom, and what loading, dealing and exchange add on top; not a model on a device. In the first two steps
of each run, which are not timed, the tiny VLM of `examples` trains for real instead: their losses say whether all orders trained
on the same global batches.

The forecast is made before anything is timed, from the costs of the same packs, by `plugin.balance` alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from expert_ranks import ARRIVAL, NUM_MICROBATCHES, NUM_RANKS, WORK_SECONDS, Forecast, Job, Measured, serve
from rich.console import Console
from rich.table import Table

Case = tuple[str, str]
"""Groups and order."""


def started(job: Job) -> Iterator[Any]:
    """What the first rank tells, as it comes; ends when all ranks have left."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    # Not daemons: they start loader workers.
    ranks = [context.Process(target=serve, args=(rank, job, there if rank == 0 else None)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    there.close()
    try:
        while True:
            yield here.recv()
    except EOFError:
        pass
    finally:
        for rank in ranks:
            rank.join(20)
            rank.kill()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}, expected 0: see above")


def forecast_table(forecasts: Mapping[Case, Forecast], seconds_per_cost: float) -> Table:
    shown = Table(title=f"forecast: {NUM_RANKS} ranks x {NUM_MICROBATCHES} packs, {WORK_SECONDS} s of work a step")
    for column in ("groups", "order", "step, s", "imbalance", "at best", "packs moved", "arrival / this"):
        shown.add_column(column, justify="right")
    for (groups, order), one in forecasts.items():
        arrival = forecasts[groups, ARRIVAL]
        shown.add_row(
            groups,
            order,
            f"{statistics.mean(one.costs) * seconds_per_cost:.3f}",
            f"{sum(one.costs) / sum(one.work):.3f}",
            f"{sum(one.bounds) / sum(one.work):.3f}",
            f"{one.num_moved / one.num_packs:.1%}",
            f"{sum(arrival.costs) / sum(one.costs):.3f}",
        )
    return shown


def measured_table(
    found: Mapping[Case, Sequence[Measured]], forecasts: Mapping[Case, Forecast], seconds_per_cost: float
) -> Table:
    """Ratios are of the two times of one global batch, then the median over all batches and rounds."""
    shown = Table(title="measured; compute is simulated by sleeping")
    for column in ("groups", "order", "step, s", "of forecast", "arrival / this", "middle half", "forecast", "off by", "exposed"):
        shown.add_column(column, justify="right")
    for (groups, order), runs in found.items():
        costs, arrival_costs = forecasts[groups, order].costs, forecasts[groups, ARRIVAL].costs
        seconds, arrival = (np.array([run.seconds for run in each]) for each in (runs, found[groups, ARRIVAL]))
        ratios, predicted = arrival / seconds, statistics.median(np.divide(arrival_costs, costs))
        ratio = float(np.median(ratios))
        exposed = np.median([run.exposed_seconds for run in runs] / seconds)
        shown.add_row(
            groups,
            order,
            f"{np.median(seconds):.3f}",
            f"{np.median(seconds / (np.array(costs) * seconds_per_cost)):.3f}",
            f"{ratio:.3f}",
            f"{np.quantile(ratios, 0.25):.3f} to {np.quantile(ratios, 0.75):.3f}",
            f"{predicted:.3f}",
            f"{ratio / predicted - 1:+.1%}",
            f"{exposed:.1%}",
        )
    return shown


def losses_differ_by(found: Mapping[Case, Sequence[Measured]]) -> float:
    """Largest relative difference, over the steps, between any two runs: they train on the same global batches."""
    losses = list(zip(*(run.losses for runs in found.values() for run in runs), strict=True))
    return max(max(step) / min(step) - 1 for step in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="timed ones, of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each case; cases take turns")
    parser.add_argument("--scratch", type=Path, help="a folder for the dataset; a temporary one when not given")
    options = parser.parse_args()
    console, began = Console(width=140), time.perf_counter()
    found: dict[Case, list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="bayplan-experts-", dir=options.scratch) as scratch:
        from expert_corpus import write_cost_model, write_skewed

        folder = Path(scratch)
        job = Job(
            url=write_skewed(folder / "data"),
            cost=write_cost_model(folder / "cost.json"),
            store=str(folder / "store"),
            steps=options.steps,
            rounds=options.rounds,
        )
        told = started(job)
        forecasts, seconds_per_cost, share = next(told)
        console.print(forecast_table(forecasts, seconds_per_cost))
        console.print(
            f"the encoder's share of the work is {share:.1%}; forecast {time.perf_counter() - began:.0f} s after the start"
        )
        meetings = next(told)
        for groups, order, run in told:
            found.setdefault((groups, order), []).append(run)
            print(f"{groups}, {order}: {sum(run.seconds) / options.steps:.3f} s a step", file=sys.stderr)
    console.print(measured_table(found, forecasts, seconds_per_cost))
    alone = ", ".join(f"{1000 * seconds:.0f} ms in {groups}" for groups, seconds in meetings.items())
    console.print(f"all-reduces of a step where nobody computes: {alone}")
    console.print(
        f"losses of the trained steps differ by at most {losses_differ_by(found):.1e}; {time.perf_counter() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()
