"""Verbs that write or check a model folder."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import image_files
from llava_norm_align.verbs.options import AsJson, Overwrite, Revision, Wheels, echo_unless, show, show_json


def assemble(
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    vision: Annotated[str | None, typer.Option(help="CLIP, SigLIP or DINOv2 tower: folder or Hub id.")] = None,
    text: Annotated[str | None, typer.Option(help="Causal language model: folder or Hub id.")] = None,
    projector: Annotated[
        Path | None, typer.Option(help="File of a projector (safetensors, mm_projector.bin); default: a fresh one.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="'micro': the small real LLaVA, from package wheels.")] = None,
    wheels: Wheels = None,
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
    as_json: AsJson = False,
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
    show(summary, as_json, describe)


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A LoRA adapter of a LLaVA: folder or Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    base: Annotated[str | None, typer.Option(help="Its base model; default: the one that it names.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a base on the Hub.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Merge a LoRA adapter into its base model: a full folder, with projector and norm from the adapter."""
    from llava_norm_align.trl_recipes.merge import describe
    from llava_norm_align.trl_recipes.merge import merge as run

    summary = run(adapter, target, base=base, revision=revision, overwrite=overwrite)
    show(summary, as_json, describe)


def extract_lm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A LLaVA: folder or Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    revision: Revision = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the language model of a LLaVA as a plain folder, byte for byte, for tools that know text only."""
    from llava_norm_align.evaluation.extract_lm import describe
    from llava_norm_align.evaluation.extract_lm import extract_lm as run

    show(run(model, target, revision=revision, overwrite=overwrite), as_json, describe)


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
    as_json: AsJson = False,
) -> None:
    """Check a norm-aligned model folder; exit code 1 if a check fails."""
    from llava_norm_align.conversion.doctor import REPAIRABLE, examine_stepwise, repair

    changes = repair(folder) if repaired else []
    echo = echo_unless(as_json)
    for change in changes:
        echo(f"Repaired: {change}")
    checks = []
    for check in examine_stepwise(folder, load=not not_loaded, pythons=pythons or []):
        checks.append(check)
        echo(f"[{check.number}] {check.name}: {check.status} ({check.detail})")
    failed = sum(check.status == "failed" for check in checks)
    if as_json:
        content = {"folder": str(folder), "ok": not failed, "checks": list(map(vars, checks)), "repaired": changes}
        show_json(content)
    echo(f"{failed} of {len(checks)} checks failed" if failed else "No check failed")
    if {check.name for check in checks if check.status == "failed"} & set(REPAIRABLE) and not repaired:
        echo("What --repair can mend: processor fields (a -> b above), tokenizer class, code files")
    if failed:
        raise typer.Exit(1)


def release(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", readable=False, help="A norm-aligned model folder.")
    ] = None,
    repo_id: Annotated[str | None, typer.Argument(metavar="USER/NAME", help="Where it goes on the Hub.")] = None,
    license: Annotated[
        str | None, typer.Option(help="Such as apache-2.0; default: that of the base's card; of --space, apache-2.0.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="The Hub id of the model that it was made of.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Code such as en; may be repeated.")] = None,
    pythons: Annotated[
        list[Path] | None,
        typer.Option("--python", metavar="PATH", help="Another interpreter to load it in; may be repeated."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check everything, show what would go up; no upload.")
    ] = False,
    card: Annotated[
        Path | None, typer.Option(metavar="FILE", readable=False, help="Write the model card there, too.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A new repository is public; default: private.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; default: main.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another model in the repository.")] = False,
    verify_load: Annotated[
        bool, typer.Option("--verify-load", help="Download the weights afterwards and let them answer.")
    ] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    space: Annotated[
        str | None, typer.Option(metavar="USER/SPACE", help="In place of a model: a Space that shows --model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="ID@COMMIT", help="Of --space: the norm-aligned model on the Hub.")
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="ID@COMMIT", help="Of --space: the model beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Of --space: a new folder to write the Space to, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put a norm-aligned model on the Hub: checks, model card, one commit, and a look at what arrived."""
    from llava_norm_align.release.release import MESSAGE, Words
    from llava_norm_align.release.release import release as run
    from llava_norm_align.release.space import release_space
    from llava_norm_align.release.upload_access import Target

    echo = echo_unless(as_json)
    if space is not None:
        of_model = {"FOLDER": folder, "--python": pythons, "--verify-load": verify_load, "--create-pr": create_pr}
        of_model |= {"--base-model": base_model, "--language": language, "--revision": revision, "--card": card}
        _refuse(of_model | {"--message": message}, "of a model, and --space puts up a page")
        if model is None:
            raise InputError("--space needs a model to show. Pass --model user/name@COMMIT, as release printed it.")
        target = Target(space, public=public, overwrite=overwrite)
        result = release_space(target, model, base=base, license=license, check=check, out=out, echo=echo)
    else:
        _refuse({"--model": model, "--base": base, "--out": out}, "of --space")
        if folder is None or repo_id is None:
            raise InputError(
                "release needs a folder and a name. Pass FOLDER USER/NAME, or --space USER/SPACE --model ID."
            )
        result = run(
            folder,
            Target(repo_id, revision=revision, create_pr=create_pr, public=public, overwrite=overwrite),
            Words(license, base_model, language or ()),
            pythons=pythons or [],
            check=check,
            card_out=card,
            verify_load=verify_load,
            message=message or MESSAGE,
            echo=echo,
        )
    if as_json:
        show_json(result)


def _refuse(options: dict[str, Any], why: str) -> None:
    """InputError for an option that was passed and has no meaning here."""
    for name, value in options.items():
        if value:
            raise InputError(f"{name} is {why}. Leave it out.")
