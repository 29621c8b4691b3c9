"""The `bayplan` command. Results go to stdout, the log to stderr; heavy imports happen inside the commands."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from packer.format.errors import BayplanError, RecipeError, UsageError
from pipelines.forecast_command import forecast

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.index import IndexReport
    from pipelines.pack import JobReport
    from pipelines.reporting import WrittenReport

EXIT_FAILURE, EXIT_USAGE = 1, 2


class _Group(click.Group):
    """Shows every BayplanError as one message, never as a traceback (unless --debug)."""

    def invoke(self, ctx: click.Context) -> Any:
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # `python:` schemas are found where Ray's workers find them
        try:
            return super().invoke(ctx)
        except (BayplanError, OSError) as error:
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise  # click ends quietly when nobody reads any more
            for line in _worded(error).splitlines():
                click.secho(f"error: {line}", fg="red", err=True)
            ctx.exit(EXIT_USAGE if isinstance(error, RecipeError | UsageError) else EXIT_FAILURE)


def _worded(error: BayplanError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="bayplan")
def main(debug: bool) -> None:
    """Turn JSONL sources with image references into a verified dataset of zip bundles with a byte-offset index.

    Exit codes: 0 all good, 1 something failed (nothing is lost, run it again), 2 wrong use, 3 more quarantined than allowed.
    """


@main.group()
def recipe() -> None:
    """Check a recipe, or describe one to an editor."""


@recipe.command("check")
@click.argument("recipe_path", metavar="RECIPE")
def recipe_check(recipe_path: str) -> None:
    """Find every mistake in RECIPE, list the input files of its sources, and open its profiles.

    Example: bayplan recipe check examples/corpus/recipe.yaml
    """
    from pipelines.inputs import check_places, list_inputs
    from pipelines.recipe import load_recipe

    loaded = load_recipe(recipe_path)
    failed, num_files = False, 0
    for source in loaded.sources:
        try:
            check_places(source)
            inputs = list_inputs(source, source.resolved_root, outside=loaded.output)
        except (BayplanError, OSError) as error:
            failed = True
            click.secho(f"error: source {source.name!r}: {error}", fg="red", err=True)
            continue
        size = sum(item.stat.size for item in inputs)
        click.echo(f"{source.name}: {len(inputs)} files, {size / 1e6:,.1f} MB, schema {source.schema_name}")
        num_files += len(inputs)
    for name, profile in loaded.profiles.items():
        from indexer.profile import open_profile

        try:
            open_profile(profile.settings(name), profile.tokenizer_file)
        except (BayplanError, OSError) as error:
            failed = True
            click.secho(f"error: {error}", fg="red", err=True)
            continue
        click.echo(f"profile {name}: {profile.tokenizer_file}")
    if failed:
        sys.exit(EXIT_FAILURE)
    numbers = f"{len(loaded.sources)} sources, {num_files} files, {len(loaded.profiles)} profiles"
    click.echo(f"{numbers}: no mistakes found")


@recipe.command("schema")
def recipe_schema_() -> None:
    """Print the JSON schema of recipes.

    Example: bayplan recipe schema > recipe.schema.json
    """
    import json

    from pipelines.recipe import recipe_schema

    click.echo(json.dumps(recipe_schema(), indent=2))


def _cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    workers = click.option("--workers", type=click.IntRange(min=1), help="CPUs of the Ray that is started here; default: all.")
    address = click.option(
        "--address", help="Join this Ray cluster; default: the one this was submitted to, else start one here."
    )
    return workers(address(command))


@main.command()
@click.argument("recipe_path", metavar="RECIPE")
@_cluster_options
@click.option("--limit", type=click.IntRange(min=1), help="Trial: about so many rows a source, into <output>.limit-N.")
@click.option("--replace-changed", is_flag=True, help="Drop and remake the parts of files that changed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pack(
    recipe_path: str, address: str | None, workers: int | None, limit: int | None, replace_changed: bool, as_json: bool
) -> None:
    """Convert the sources of RECIPE into its dataset. Run it again to go on, or to add new files.

    Example: bayplan pack examples/corpus/recipe.yaml
    """
    from pipelines.recipe import load_recipe

    loaded = load_recipe(recipe_path)
    with _job(address, workers) as (progress, should_stop):
        from pipelines.pack import PackJob

        job = PackJob(loaded, limit=limit, replace_changed=replace_changed, listener=progress, should_stop=should_stop)
        report = job.run()
    _print_report(report, as_json)
    sys.exit(report.exit_code)


@contextlib.contextmanager
def _job(address: str | None, workers: int | None) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """Ray, a progress display, and a flag that Ctrl-C or SIGTERM sets."""
    import ray

    from pipelines.progress import ProgressDisplay
    from pipelines.ray_executor import connect

    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    console = _console()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints its warnings to stdout, which is for results
        connect(address, workers)
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ProgressDisplay(console) as progress:
                yield progress, lambda: stopped
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            ray.shutdown()


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _print_report(report: JobReport, as_json: bool) -> None:
    from pipelines.report_text import report_json, report_lines

    if as_json:
        click.echo(report_json(report))
    else:
        for line in report_lines(report):
            click.echo(line)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@_cluster_options
@click.option("--profile", "profiles", multiple=True, help="Only this profile; default: all.")
@click.option("--recipe", "recipe_path", help="Take `profiles` (only) from this recipe; default: the one in the dataset.")
@click.option("--replace-changed", is_flag=True, help="Drop the index of a profile that changed and count anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def index(
    dataset_url: str,
    address: str | None,
    workers: int | None,
    profiles: tuple[str, ...],
    recipe_path: str | None,
    replace_changed: bool,
    as_json: bool,
) -> None:
    """Count the tokens and images of every sample of DATASET by its recipe's profiles. Run it again to go on.

    Example: bayplan index demo-dataset
    """
    from pipelines.index import IndexJob
    from pipelines.recipe import load_recipe

    recipe = load_recipe(recipe_path) if recipe_path else None
    job = IndexJob(dataset_url, profiles=profiles, recipe=recipe, replace_changed=replace_changed)
    with _job(address, workers) as (progress, should_stop):
        report = job.run(progress, should_stop)
    _print_index(report, as_json)
    sys.exit(report.exit_code)


def _print_index(report: IndexReport, as_json: bool) -> None:
    from pipelines.index_text import index_json, index_lines

    if as_json:
        click.echo(index_json(report))
    else:
        for line in index_lines(report):
            click.echo(line)


@main.command()
@click.argument("recipe_path", metavar="RECIPE")
@_cluster_options
@click.option("--replace-changed", is_flag=True, help="Drop and remake what changed: parts of files, indexes of profiles.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def run(recipe_path: str, address: str | None, workers: int | None, replace_changed: bool, as_json: bool) -> None:
    """Pack, index and report: all of RECIPE in one job. Run it again to go on.

    Example: bayplan run examples/corpus/recipe.yaml
    """
    from pipelines.recipe import load_recipe
    from pipelines.run import check_run, run_recipe

    loaded = load_recipe(recipe_path)
    check_run(loaded, replace_changed=replace_changed)
    with _job(address, workers) as (progress, should_stop):
        outcome = run_recipe(loaded, replace_changed=replace_changed, listener=progress, should_stop=should_stop)
    if as_json:
        from pipelines.run import run_json

        click.echo(run_json(outcome))
        sys.exit(outcome.exit_code)
    if outcome.index is not None:
        _print_index(outcome.index, as_json=False)
    if outcome.report is not None:
        _print_statistics(outcome.report, as_json=False)
    if outcome.report_failure is not None:
        click.echo(f"FAILED report: {outcome.report_failure}")
    _print_report(outcome.pack, as_json=False)
    sys.exit(outcome.exit_code)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@click.option("--profile", "profiles", multiple=True, help="Only this profile; default: all.")
@click.option("--cards", type=click.IntRange(min=0), default=4, show_default=True, help="Sample cards for each source.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which samples the cards show.")
@click.option("--to", "folder", type=click.Path(file_okay=False), help="Folder to write to; default: report/ in DATASET.")
@click.option("--forecast", "forecast_file", metavar="FILE", help="Show this forecast: JSON of `bayplan forecast`.")
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
def report(
    dataset_url: str,
    profiles: tuple[str, ...],
    cards: int,
    seed: int,
    folder: str | None,
    forecast_file: str | None,
    as_json: bool,
) -> None:
    """Write the statistics of DATASET as one HTML page and as JSON, and print a summary.

    Example: bayplan report demo-dataset
    """
    from pipelines.reporting import write_report

    written = write_report(dataset_url, profiles, num_cards=cards, seed=seed, folder=folder, forecast_file=forecast_file)
    _print_statistics(written, as_json)


def _print_statistics(written: WrittenReport, as_json: bool) -> None:
    import json

    from rich.console import Console

    from pipelines.report_terminal import print_summary

    if as_json:
        click.echo(json.dumps(written.document, indent=2, ensure_ascii=False))
    else:
        print_summary(written.document, Console())
        click.echo(f"report: {written.place}")


@main.command()
@click.argument("recipe_path", metavar="RECIPE")
@_cluster_options
@click.option("--cores", type=click.IntRange(min=1), default=64, show_default=True, help="Cores to reckon the hours for.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def estimate(recipe_path: str, address: str | None, workers: int | None, cores: int, as_json: bool) -> None:
    """Look at the first rows of every source: how large will the dataset be, how long will it take, what will be refused?

    Example: bayplan estimate examples/corpus/recipe.yaml
    """
    from pipelines.recipe import load_recipe

    loaded = load_recipe(recipe_path)
    with _job(address, workers) as (progress, should_stop):
        from pipelines.estimate import estimate_recipe, estimate_table

        estimates = estimate_recipe(loaded, progress, should_stop)
    click.echo(estimate_table(estimates, cores, as_json))
    if any(item.failure for item in estimates):
        sys.exit(EXIT_FAILURE)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@click.option("--deep", is_flag=True, help="Also decode every image.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; default: all cores.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(dataset_url: str, deep: bool, workers: int | None, as_json: bool) -> None:
    """Prove DATASET against its own manifests: sizes, digests, zip directories, every offset and checksum, every sum.

    Example: bayplan verify demo-dataset
    """
    from pipelines.verifying import print_verdict, verify_dataset

    verdict = verify_dataset(dataset_url, deep=deep, workers=workers, console=_console())
    print_verdict(verdict, as_json)
    sys.exit(EXIT_FAILURE if verdict.problems else 0)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@click.argument("what", metavar="SOURCE[:N|:ID]")
@click.option("--open", "as_html", is_flag=True, help="Write one HTML page and open it.")
@click.option("--to", "folder", type=click.Path(file_okay=False), help="Folder for the images or the page; default: a new one.")
def show(dataset_url: str, what: str, as_html: bool, folder: str | None) -> None:
    """Show a record readably and write its images out.

    N is the record's place in its source (from 0), ID its id; without either, the first record is shown.

    Example: bayplan show demo-dataset handbook:3
    """
    from pipelines.show import show_record

    show_record(dataset_url, what, as_html=as_html, folder=folder)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@click.option("--source", help="Only this source.")
@click.option("--reason", help="Only this reason code.")
@click.option("--examples", type=click.IntRange(min=0), default=1, show_default=True, help="Rows to show for each reason.")
@click.option("--json", "as_json", is_flag=True, help="Print every quarantined row as a JSON line.")
def quarantine(dataset_url: str, source: str | None, reason: str | None, examples: int, as_json: bool) -> None:
    """Show what was quarantined, by source and reason.

    Example: bayplan quarantine demo-dataset --examples 2
    """
    from pipelines.quarantine import print_quarantine

    print_quarantine(dataset_url, source=source, reason=reason, examples=examples, as_json=as_json)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@_cluster_options
@click.option("--source", "only", multiple=True, help="Only these sources.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def retry(dataset_url: str, address: str | None, workers: int | None, only: tuple[str, ...], as_json: bool) -> None:
    """Read the quarantined rows of DATASET again from their sources; those that are good now become records.

    Uses the recipe kept in the dataset. Doing it twice changes nothing.

    Example: bayplan retry demo-dataset
    """
    with _job(address, workers) as (progress, should_stop):
        from pipelines.retrying import retry_dataset

        report = retry_dataset(dataset_url, only, progress, should_stop)
    _print_report(report, as_json)
    sys.exit(report.exit_code)


@main.command()
@click.argument("dataset_url", metavar="DATASET")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def status(dataset_url: str, as_json: bool) -> None:
    """Show what DATASET holds so far, from its manifests; works while a job is running.

    Example: bayplan status demo-dataset
    """
    from pipelines.status import print_status

    print_status(dataset_url, as_json)


@main.command("image-tokens")
@click.argument("sizes", nargs=-1, metavar="[SIZE]...")
@click.option("--rule", "rules", multiple=True, help="Only this rule, or your own as module:function; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line for each size and rule.")
def image_tokens(sizes: tuple[str, ...], rules: tuple[str, ...], as_json: bool) -> None:
    """Count the image tokens and encoder patches that models give to images of SIZE (upright WIDTHxHEIGHT).

    Sizes are read from stdin when none are given, or for a `-`.

    Example: bayplan image-tokens --rule qwen3_vl --rule internvl3 1920x1080 640x480
    """
    from pipelines.image_tokens import print_image_tokens

    print_image_tokens(sizes, rules, as_json)


@main.command()
@click.argument("timings", nargs=-1, required=True, metavar="TIMINGS...")
@click.option("--to", help="Write the cost model into this .json file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def calibrate(timings: tuple[str, ...], to: str | None, as_json: bool) -> None:
    """Fit a cost model to TIMINGS, JSON lines of measured microbatches as `StepTimer` writes them, one file a rank.

    Shows each coefficient, how well times are explained, and which coefficients the data do not tell apart.

    Example: bayplan calibrate examples/timings.jsonl --to cost.json
    """
    from pipelines.calibrate import calibrate as run_calibration

    run_calibration(timings, to, as_json)


main.add_command(forecast)


if __name__ == "__main__":
    main()
