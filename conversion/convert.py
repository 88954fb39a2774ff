"""A stock LLaVA in, a norm-aligned one out: weights are copied byte for byte, the norm lies in a file of its own."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import first_line, load_processor, resolve_weights
from llava_norm_align.common.results import FOLDER, provenance, write_json
from llava_norm_align.common.samples import sample_photos
from llava_norm_align.configuration.configuration_llava_norm_align import NORM_ALIGN_TYPES
from llava_norm_align.conversion.calibration import check_gain, check_target_norm
from llava_norm_align.conversion.config_file import write_config
from llava_norm_align.conversion.doctor import check_new_model
from llava_norm_align.conversion.files import copy_small_files
from llava_norm_align.conversion.original import is_original, stage_original
from llava_norm_align.conversion.processor_fields import (
    check_processor_files,
    complete_processor_files,
    make_tokenizer_portable,
)
from llava_norm_align.conversion.processor_files import carry_chat_template
from llava_norm_align.conversion.replaced_projector import check_norm_start, replace_projector
from llava_norm_align.conversion.report import run_in_fresh_process
from llava_norm_align.conversion.source import Source, read_source
from llava_norm_align.conversion.target import calibrate, scale_factor
from llava_norm_align.conversion.tokenizer_class import match_stock_tokenizer, missing_file
from llava_norm_align.conversion.verify import check_keys, quiet_transformers
from llava_norm_align.conversion.weight_files import (
    LEARNED,
    WeightFile,
    check_weights,
    count_tensors,
    fold_factor,
    lay_out,
    place_weights,
    plan_weights,
)

REPORT_BELOW = 4_000_000_000  # bytes of weights up to which the report is on by itself
STAGE = ".source"  # where a source in another layout is written first, in the new folder


def convert(
    source: str,
    target: Path,
    *,
    revision: str | None = None,
    vision: str | None = None,
    text: str | None = None,
    projector: Path | None = None,
    norm_type: str = "layer_norm",
    target_norm: float | None = None,
    start: str = "text",
    bias: bool = True,
    gradient_compensation: bool = True,
    fold: bool = False,
    images: Sequence[Path] = (),
    report: bool | None = None,
    link: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the norm-aligned version of the LLaVA `source` to the folder `target`; returns a summary for JSON.

    `source`: a folder or Hub id (at `revision`) of model_type llava, llava_next, llava_onevision or vipllava; or one
    in the layout of the original LLaVA repository, with its vision tower `vision`; or an mm_projector.bin, with
    `vision` and the language model `text` (folders or Hub ids).
    `projector`: a file that `read_projector` reads, for a source in transformers' layout. Its tensors take the place
    of the source's; a norm in it is the result's, and its T the one that it started at, if the file says so.
    `norm_type`: "layer_norm" (the paper), "rms_norm", "scale" (one factor, measured on `images`) or "none".
    `target_norm`: the L2 norm T that visual tokens start with; None measures it, by `start`: "text" is the mean norm
    of the text embeddings (the paper), "visual" the mean norm of the projector's output on `images`. `bias` and
    `gradient_compensation` belong to the two learned types. `fold` multiplies the factor of "scale" into the
    projector's last layer: the result is a stock LLaVA.
    `images` default to scikit-image's photos. `report` compares both models on the images; None means: below 4 GB of
    weights, if images and the processor load. `link`: weight files are hard links to the source's. `dry_run`: nothing
    is written; the summary says what would be.
    InputError for bad input, CheckFailed if the result does not hold what it must; both leave no folder behind.
    """
    clock = Clock()
    target, images = Path(target), [Path(path) for path in images]
    check_options(norm_type, target_norm, start, fold)
    for path in images:
        open_image(path)
    check_target(target, overwrite)
    is_projector = Path(source).suffix == ".bin" and Path(source).is_file()
    origin = Path(source) if is_projector else resolve_weights(source, revision)
    staged = is_original(origin)
    if not staged and (vision or text):
        raise InputError(
            f"{origin} is a whole model in the transformers layout, so --vision and --text have no use. Omit them."
        )
    if staged and projector:
        raise InputError(
            f"{origin} is in the layout of the original LLaVA repository, for which --projector is not taken. Put a "
            f"LLaVA together (llava-norm-align assemble), then convert that with --projector {projector}."
        )

    parts = map(Path, filter(None, (vision, text, projector)))
    inputs = [path for path in (origin, *parts, *images) if path.exists()]
    with _workplace(target, overwrite, inputs, dry_run) as folder:
        notes, own_rows = stage_original(origin, folder / STAGE, vision, text, dry_run) if staged else ([], None)
        stock = read_source(folder / STAGE if staged else origin)
        if link and (staged or stock.weights.pickled):
            raise InputError(f"The weights of {origin} are not safetensors of a transformers LLaVA. Leave out --link.")
        check_processor_files(stock.folder, stock.config)
        if link:
            _check_link(target, stock)
        elif not staged:
            _check_space(target, stock)
        of_file: dict[str, Any] = {}
        if projector:
            stock, of_file = replace_projector(stock, Path(projector), norm_type, start, bias)
        asked, (report, why_no_report) = report is True, _plan_report(stock, images, False if dry_run else report)
        on_images = norm_type == "scale" or start == "visual"
        images = images or (sample_photos("A conversion that measures images") if report or on_images else [])
        calibration = calibrate(stock, target_norm or of_file.get("norm_start"), start, own_rows)
        fields = _norm_fields(norm_type, calibration["target_norm"], bias, gradient_compensation)
        if projector:
            _describe_projector(calibration, fields, stock, of_file, target_norm)
        clock.lap("calibrate")

        notes += _write_small_files(folder, stock, fold)
        # the processor's classes ask for the model's type
        write_config(folder, stock, None if fold else {"norm_align_type": "none"})
        problem = _processor_problem(folder, stock) if report or on_images else None
        if problem and (on_images or asked):
            raise InputError(f"{problem.rstrip('.')}. A report, --norm scale and --start visual need one.")
        if problem:
            report, why_no_report = False, [f"no report: {problem}"]
        job = {"source": str(stock.folder), "target": str(folder), "images": list(map(str, images))}
        if on_images:
            of_model = {"task": "projector_norm", **job, "projector": projector and str(projector)}
            calibration |= run_in_fresh_process(of_model)
            _start_from_images(fields, calibration, stock)
        notes += write_config(folder, stock, None if fold else fields)
        plan = plan_weights(stock, fields, link or staged, fold)
        lay_out(folder, stock, plan, fields)
        made_of = {"source": source, "source_on_hub": not Path(source).exists()}
        write_json(folder / FOLDER / "calibration.json", {**provenance(), **made_of, **calibration})
        tensors = _check_source_fits(folder, stock, origin, fold)
        clock.lap("check")
        summary = {
            "source": str(origin),
            "target": str(target),
            "family": stock.kind,
            "norm": fields,
            "folded": fold,
            "calibration": calibration,
            "weights": [_describe(file, origin if staged else None) for file in plan],
            "files": sorted(str(path.relative_to(folder)) for path in _files(folder)),
        }
        if dry_run:
            return {**summary, "dry_run": True, "notes": notes, "seconds": clock.seconds}

        checksums = place_weights(folder, stock, plan)
        clock.lap("write")
        digests = check_weights(folder, stock, plan, checksums)
        if fold:
            digests |= fold_factor(folder, stock, plan, fields["norm_align_scale"])
        clock.lap("verify")
        if not fold:
            failed = check_new_model(folder, "converted", "transformers and torch", tensors)
            notes += [f"the source's {check.name}: {check.detail}" for check in failed]
        clock.lap("doctor")
        job |= {"text_target": _text_target(calibration), "starts": not of_file.get("norm")}
        comparison = run_in_fresh_process({"task": "report", **job}) if report else None
        if comparison and not comparison["text_logits_equal"]:
            raise CheckFailed(
                f"The converted model and {origin} give different logits for text without an image; they must "
                "be bit-equal. Nothing was kept. Please report this with the versions of transformers and torch."
            )
        if comparison:
            content = {**provenance(), **made_of, **calibration, "report": comparison}
            write_json(folder / FOLDER / "calibration.json", content)
        clock.lap("report")
        shutil.rmtree(folder / STAGE, ignore_errors=True)
    return {
        **summary,
        "verification": {
            "tensors": tensors,
            **count_tensors(stock, fold),
            "linked": len(plan) - len(digests) if link else 0,
            "sha256": digests,
        },
        "report": comparison,
        "notes": notes + why_no_report,
        "paths": {"model": str(target), "calibration": str(target / FOLDER / "calibration.json")},
        "seconds": clock.total(),
    }


class Clock:
    """Wall seconds of the parts of a conversion."""

    def __init__(self):
        self.began = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": time.perf_counter() - self.began}


def check_options(norm_type: str, target_norm: float | None, start: str, fold: bool) -> None:
    """InputError for options of convert that do not go together."""
    if norm_type not in NORM_ALIGN_TYPES:
        raise InputError(f"--norm is {norm_type!r}. Pass one of {', '.join(NORM_ALIGN_TYPES)}.")
    check_target_norm(target_norm)
    if start not in ("text", "visual"):
        raise InputError(f"--start is {start!r}. Pass text (the paper's way) or visual.")
    if start == "visual" and target_norm is not None:
        raise InputError(
            f"--start visual measures the norm to start with, but --target {target_norm} gives one. Choose."
        )
    if start == "visual" and norm_type not in LEARNED:
        raise InputError(
            f"--start visual is for a norm with a gain ({', '.join(LEARNED)}), but --norm is {norm_type}. "
            "Leave one of them out."
        )
    if fold and norm_type != "scale":
        raise InputError(
            f"--fold is for --norm scale, one factor that the projector's last layer can hold; --norm is {norm_type}, "
            "which no linear layer can hold. Leave out --fold, or pass --norm scale."
        )


@contextmanager
def _workplace(target: Path, overwrite: bool, inputs: Sequence[Path], dry_run: bool) -> Iterator[Path]:
    """The folder that becomes `target`, which touches none of `inputs`, or one that is thrown away."""
    if dry_run:
        check_target(target, overwrite, tuple(inputs))
        with tempfile.TemporaryDirectory(prefix="llava-norm-align-") as folder:
            yield Path(folder)
    else:
        with new_folder(target, overwrite, tuple(inputs)) as folder:
            yield folder


def _check_link(target: Path, stock: Source) -> None:
    parent = next(path for path in target.resolve().parents if path.exists())
    for file in stock.weights.files:
        if file.resolve().stat().st_dev != parent.stat().st_dev:
            raise InputError(
                f"{file} and {target} lie on different file systems, which a hard link cannot join. Leave out --link "
                "to copy, or name a target on the disk of the source."
            )


def _check_space(target: Path, stock: Source) -> None:
    parent = next(path for path in target.resolve().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < stock.nbytes:
        raise InputError(
            f"{target} needs {stock.nbytes / 1e9:.1f} GB, but the disk of {parent} has {free / 1e9:.1f} GB free. "
            "Make room, name a target on another disk, or pass --link if it is the disk of the source."
        )


def _plan_report(stock: Source, images: Sequence[Path], report: bool | None) -> tuple[bool, list[str]]:
    """Whether to report, and in words why not if nobody decided it."""
    has_processor = any(
        (stock.folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )
    if report and not has_processor:
        raise InputError(
            f"A report needs a processor, but {stock.folder} has none (preprocessor_config.json). Pass --no-report."
        )
    if report is not None:
        return report, []
    if stock.nbytes >= REPORT_BELOW:
        return False, [
            f"no report: the weights have {stock.nbytes / 1e9:.1f} GB; pass --report to load the model twice"
        ]
    if not has_processor:
        return False, ["no report: the source has no processor"]
    try:
        images or sample_photos("A report")
    except InputError as error:
        return False, [f"no report: {error}"]
    return True, []


def _norm_fields(norm_type: str, target: float | None, bias: bool, gradient_compensation: bool) -> dict[str, Any]:
    """The config fields of the norm, as far as they are known before images are looked at."""
    fields = {"norm_align_type": norm_type, "norm_align_target": None if norm_type == "none" else target}
    if norm_type in LEARNED:
        fields |= {"norm_align_bias": bias, "norm_align_gradient_compensation": gradient_compensation}
    return fields


def _describe_projector(
    calibration: dict[str, Any], fields: dict[str, Any], stock: Source, of_file: dict[str, Any], given: float | None
) -> None:
    """Say in `calibration` which file the projector is from; if its norm is too, let `fields` describe that norm."""
    calibration["projector"] = of_file
    if of_file["norm"]:
        fields["norm_align_bias"] = "bias" in stock.norm
        if given is None and of_file["norm_start"]:
            calibration["target_from"] = "projector file"
        check_norm_start(stock, calibration["target_norm"])


def _start_from_images(fields: dict[str, Any], calibration: dict[str, Any], stock: Source) -> None:
    """Fill in what the mean norm of the projector's output decides: the factor of "scale", or T."""
    if fields["norm_align_type"] == "scale":
        fields["norm_align_scale"] = scale_factor(calibration["target_norm"], calibration["projector_norm"])
    else:
        fields["norm_align_target"] = calibration["target_norm"] = calibration["projector_norm"]
        check_gain(calibration["target_norm"], stock.config.text_config.hidden_size)


def _text_target(calibration: dict[str, Any]) -> float | None:
    """The norm of text tokens that a report compares with: the given or measured T, else the table's if it is one."""
    scale = calibration["embedding_scale"]
    if calibration["target_from"] != "visual":
        return calibration["target_norm"]
    return calibration["table"]["mean"] * scale["text"] / scale["image"] if scale else None


def _processor_problem(folder: Path, stock: Source) -> str | None:
    """Why the processor of the new folder, which is the source's, cannot be loaded; None if it can."""
    try:
        with quiet_transformers():
            processor = load_processor(folder)
    except InputError as error:
        return str(error).replace(str(folder), str(stock.folder))
    if not hasattr(processor, "image_token"):
        name = type(processor).__name__
        return f"The processor files of {stock.folder} name {name}, which has no image token. Correct processor_class"
    return None


def _write_small_files(folder: Path, stock: Source, fold: bool) -> list[str]:
    """Write everything but config.json, code and the weights; returns notes for the user."""
    notes = copy_small_files(stock.folder, folder)
    if not stock.weights.pickled:
        notes += [
            f"{path.name} was left out: the safetensors beside it are used"
            for path in sorted(stock.folder.glob("pytorch_model*.bin"))
        ]
    with quiet_transformers():
        notes += complete_processor_files(folder, stock.config)
    notes += make_tokenizer_portable(folder)
    if not fold:  # which is a stock model
        notes += match_stock_tokenizer(folder, stock.kind) + missing_file(folder, stock.kind)
    return notes + carry_chat_template(folder)


def _describe(file: WeightFile, origin: Path | None) -> dict[str, Any]:
    """One weight file; what comes from an `origin` in another layout is new, whatever brings it to its place."""
    name, how = (origin.name, "rewrite") if origin else (file.source.name, file.how)
    return {"file": file.name, "from": name, "bytes": file.source.stat().st_size, "how": how}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and STAGE not in path.parts]


def _check_source_fits(folder: Path, stock: Source, origin: Path, fold: bool) -> int:
    """The number of tensors of the converted model. InputError if the source's weights are not those of its config."""
    try:
        return check_keys(folder, stock.model_class, stock.config if fold else None)
    except RuntimeError as error:
        reason = str(error).replace(str(folder), str(origin))
        raise InputError(f"The weights and config.json of {origin} do not belong together. {reason}") from error
    except Exception as error:  # whatever a class raises for values that it was not made for
        raise InputError(
            f"transformers {transformers.__version__} cannot build the model of {origin / 'config.json'} "
            f"({type(error).__name__}: {first_line(error)}). Correct that value, or download the model again."
        ) from error
