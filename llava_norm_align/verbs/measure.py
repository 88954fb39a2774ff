"""Verbs that measure a model, or let it answer."""

from pathlib import Path
from typing import Annotated

import typer

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_config, load_model, load_processor, resolve_model
from llava_norm_align.verbs.options import (
    AsJson,
    Device,
    DeviceMap,
    Dtype,
    FourBit,
    Results,
    Revision,
    TrustRemoteCode,
    echo_unless,
    show_json,
)


def diagnose(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Any vision-language model: folder or Hub id.")],
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", readable=False, help="Image, or folder of images; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most images that are used.")] = 32,
    prompt: Annotated[str | None, typer.Option(help="The question about each image.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Scale the visual tokens after the fact: how far does the next token move?")
    ] = False,
    attention: Annotated[
        bool, typer.Option("--attention/--no-attention", help="Measure text-to-image attention.")
    ] = True,
    compare: Annotated[
        str | None, typer.Option(metavar="OTHER.json", help="A second diagnosis.json, shown beside this one.")
    ] = None,
    out: Results = None,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    load_in_4bit: FourBit = False,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Measure the norm gap between visual and text tokens of any vision-language model, layer by layer."""
    from llava_norm_align.diagnosis.diagnose import QUESTION
    from llava_norm_align.diagnosis.diagnose import diagnose as run

    result = run(
        model,
        images=images or [],
        limit=limit,
        question=QUESTION if prompt is None else prompt,
        out=out,
        other=compare,
        with_attention=attention,
        with_probe=probe,
        dtype=dtype,
        device=device,
        device_map=device_map,
        four_bit=load_in_4bit,
        trust_remote_code=trust_remote_code,
        revision=revision,
        echo=echo_unless(as_json),
    )
    if as_json:
        show_json(result)


def ask(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id.")],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", readable=False, help="Image file.")],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="In quotes.")],
    baseline: Annotated[str | None, typer.Option(help="A second model that answers too: folder or Hub id.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy; above: sampled.")] = 0.0,
    revision: Revision = None,
) -> None:
    """Ask one or two models about an image; the answer streams."""
    from llava_norm_align.evaluation.answer import answer

    if not question.strip():
        raise InputError("The question is empty; write one in quotes after the image.")
    photo = open_image(image)
    folders = [(model, resolve_model(model, revision))]
    if baseline is not None:
        folders.append((baseline, resolve_model(baseline)))
    for _, folder in folders:
        load_config(folder)  # before the first model answers
    for name, folder in folders:
        network, processor = load_model(folder), load_processor(folder)
        if len(folders) > 1:
            typer.echo(f"{name}: ", nl=False)
        answer(
            network,
            processor,
            photo,
            question,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            on_text=lambda piece: print(piece, end="", flush=True),
        )
        typer.echo()
        del network  # two large models need not fit beside each other


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id; several with commas are seeds of one training.")
    ],
    tasks: Annotated[
        list[str],
        typer.Option("--tasks", help="easy-vqa, SET.json, or a group: paper, llava, text; may be repeated."),
    ],
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="OTHER", help="A model to compare with, as MODEL; may be repeated."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(readable=False, help="Folder of SET.json's images; default: that of the file.")
    ] = None,
    untouched: Annotated[
        str | None, typer.Option(metavar="LLM", help="Of --tasks text: the language model before any training.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(readable=False, help="Of a group: a folder with more tasks of its harness.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many rows of each test set.")] = None,
    batch_size: Annotated[int, typer.Option(help="Questions at once.")] = 8,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens; default: 16.")] = None,
    out: Results = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the answers of an earlier run.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    load_in_4bit: FourBit = False,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model with its baselines on the same questions: paired differences with intervals."""
    from llava_norm_align.evaluation.groups import evaluate_any

    result = evaluate_any(
        model,
        tasks,
        baselines=baselines or [],
        images=images,
        untouched=untouched,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        out=out,
        overwrite=overwrite,
        dtype=dtype,
        device=device,
        device_map=device_map,
        four_bit=load_in_4bit,
        trust_remote_code=trust_remote_code,
        revision=revision,
        echo=echo_unless(as_json),
    )
    if as_json:
        show_json(result)
