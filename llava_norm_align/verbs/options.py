"""Options that several verbs take, and how a verb shows its result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a target folder that is not empty.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:1; default: cuda if there is one.")]
DeviceMap = Annotated[str | None, typer.Option(help="auto: spread over all GPUs and the CPU.")]
FourBit = Annotated[bool, typer.Option("--load-in-4bit", help="NF4, with bitsandbytes.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that the model brings.")]
Results = Annotated[
    Path | None, typer.Option(help="Folder of the result files; default: norm_align in the model's folder.")
]
Wheels = Annotated[Path | None, typer.Option(help="Folder with micro's wheels; default: they are downloaded.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def show(result: dict[str, Any], as_json: bool, describe: Callable[[dict[str, Any]], str]) -> None:
    """Print `result` as JSON, or in words."""
    show_json(result) if as_json else typer.echo(describe(result))


def show_json(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2, allow_nan=False))


def echo_unless(as_json: bool) -> Callable[[str], None]:
    """What prints a line of text where standard output is not for JSON alone."""
    return (lambda text: None) if as_json else typer.echo
