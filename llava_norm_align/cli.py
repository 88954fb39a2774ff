"""The command line: one program whose verbs call plain functions."""

from typing import Annotated, NoReturn

import transformers
import typer

from llava_norm_align import __version__
from llava_norm_align.common.program import run_program
from llava_norm_align.verbs import measure, models, training

app = typer.Typer(
    help="Give a LLaVA checkpoint a norm-aligned projector (arXiv 2512.08374).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> NoReturn:
    """Run the program. Exit code 0: done; 1: a check failed; 2: bad input or usage."""
    run_program(app)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llava-norm-align {__version__}, transformers {transformers.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' logs.")] = False,
) -> None:
    pass


# In the order of --help: the way that a checkpoint takes.
for verb in (models.assemble, measure.diagnose, models.convert, measure.ask, models.doctor, training.check_data):
    app.command(verb.__name__.replace("_", "-"))(verb)
# Its arguments are read by the recipe's own parser.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(
    training.train
)
for verb in (models.merge, measure.evaluate, models.extract_lm, models.release, training.demo):
    app.command(verb.__name__.replace("_", "-"))(verb)
