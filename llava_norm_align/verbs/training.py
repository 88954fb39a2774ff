"""Verbs from data to a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from llava_norm_align.verbs.options import AsJson, Overwrite, Wheels, show


def check_data(
    data: Annotated[Path, typer.Argument(metavar="DATA.json", readable=False, help="Rows in LLaVA's JSON.")],
    images: Annotated[Path, typer.Option(readable=False, help="The folder that image paths start from.")],
    model: Annotated[str | None, typer.Option(help="A LLaVA (folder, Hub id) by which tokens are counted.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Most tokens of a row; needs --model.")] = None,
    template: Annotated[
        str | None, typer.Option("--chat-template-path", help="vicuna_v1, smollm2 or a Jinja file.")
    ] = None,
    stage: Annotated[int, typer.Option(min=1, max=2, help="1: one image and one answer a row; 2.")] = 2,
    decode: Annotated[bool, typer.Option("--decode", help="Read all pixels, not the headers alone.")] = False,
    follow_links: Annotated[bool, typer.Option("--follow-links", help="Links may lead out of the folder.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Threads that read images.")] = 2,
    clean: Annotated[Path | None, typer.Option(metavar="OUT.json", help="New file for the good rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check training data in LLaVA's JSON: structure, images, token lengths; exit code 1 if a row is bad."""
    from llava_norm_align.data.check import check_data as run
    from llava_norm_align.data.check_report import describe

    report = run(
        data,
        images,
        model,
        max_length=max_length,
        template=template,
        decode=decode,
        jobs=jobs,
        stage=stage,
        follow_links=follow_links,
        clean=clean,
    )
    show(report, as_json, describe)
    if report["totals"]["bad"] and clean is None:
        raise typer.Exit(1)


def train(context: typer.Context) -> None:
    """Train by a recipe: train RECIPE.yaml [--field value ...]; recipes and fields with --help."""
    from llava_norm_align.trl_recipes.train import train as run

    run(*context.args, echo=typer.echo)


def demo(
    target: Annotated[Path, typer.Option("--out", metavar="DST", help="The folder to write.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 45,
    questions: Annotated[int, typer.Option(min=1, help="Test questions that each model answers.")] = 256,
    wheels: Wheels = None,
    overwrite: Overwrite = False,
) -> None:
    """A real small LLaVA measured, converted, trained and asked, in a few minutes on two CPU cores."""
    from llava_norm_align.demo import run

    run(target, steps=steps, questions=questions, wheels=wheels, overwrite=overwrite, echo=typer.echo)
