"""A stock LLaVA in, a norm-aligned one out: weights are copied byte for byte, the norm lies in a file of its own."""

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import first_line, load_processor, resolve_model
from llava_norm_align.common.results import FOLDER, provenance, write_json
from llava_norm_align.common.weights import SINGLE_FILE, write_index
from llava_norm_align.configuration.configuration_llava_norm_align import AUTO_MAP, NORM_ALIGN_TYPES
from llava_norm_align.conversion.calibration import check_gain, check_target_norm, measure_table
from llava_norm_align.conversion.embedding_scale import measure_embedding_scale
from llava_norm_align.conversion.files import copy_small_files, copy_with_digests
from llava_norm_align.conversion.processor_fields import (
    check_processor_files,
    complete_processor_files,
    count_additional_tokens,
    make_tokenizer_portable,
)
from llava_norm_align.conversion.report import run_in_fresh_process, sample_photos
from llava_norm_align.conversion.source import Source, read_source
from llava_norm_align.conversion.verify import check_copies, check_keys, check_norm, quiet_transformers
from llava_norm_align.modeling.modeling_llava_norm_align import save_code

LEARNED = ("layer_norm", "rms_norm")  # the types with tensors
REPORT_BELOW = 4_000_000_000  # bytes of weights up to which the report is on by itself


def convert(
    source: str,
    target: Path,
    *,
    revision: str | None = None,
    norm_type: str = "layer_norm",
    target_norm: float | None = None,
    bias: bool = True,
    gradient_compensation: bool = True,
    images: Sequence[Path] = (),
    report: bool | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the norm-aligned version of the LLaVA `source` to the folder `target`; returns a summary for JSON.

    `source`: a folder or Hub id (at `revision`) of a checkpoint of model_type llava in safetensors. `norm_type`:
    "layer_norm" (the paper), "rms_norm", "scale" (one factor, measured on `images`) or "none". `target_norm`: the L2
    norm T that visual tokens start with; None measures the mean norm of the text embeddings. `bias` and
    `gradient_compensation` belong to the two learned types. `images` default to scikit-image's photos. `report`
    compares both models on the images; None means: below 4 GB of weights, if images and the processor load.
    InputError for bad input, CheckFailed if the result does not hold what it must; both leave no folder behind.
    """
    started = time.perf_counter()
    target, images = Path(target), [Path(path) for path in images]
    if norm_type not in NORM_ALIGN_TYPES:
        raise InputError(f"--norm is {norm_type!r}; one of {', '.join(NORM_ALIGN_TYPES)} was expected.")
    check_target_norm(target_norm)
    for path in images:
        open_image(path)
    check_target(target, overwrite)
    stock = read_source(resolve_model(source, revision))
    check_processor_files(stock.folder)
    _check_space(target, stock)
    needs_processor = bool(report) or norm_type == "scale"
    report, why_no_report = _plan_report(stock, images, report)
    images = images or (sample_photos() if report or norm_type == "scale" else [])

    calibration = _calibrate(stock, target_norm)
    fields = {"norm_align_type": norm_type, "norm_align_target": calibration["target_norm"]}
    if norm_type in LEARNED:
        fields |= {"norm_align_bias": bias, "norm_align_gradient_compensation": gradient_compensation}
    elif norm_type == "none":
        fields["norm_align_target"] = None
    seconds = {"calibrate": time.perf_counter() - started}

    with new_folder(target, overwrite, (stock.folder,)) as folder:
        notes = _write_small_files(folder, stock)
        _write_config(folder, stock, {"norm_align_type": "none"})  # the processor's classes ask for the model's type
        problem = _processor_problem(folder, stock) if report or needs_processor else None
        if problem and needs_processor:
            raise InputError(f"{problem.rstrip('.')}. A report and --norm scale need one; repair it.")
        if problem:
            report, why_no_report = False, [f"no report: {problem}"]
        job = {"source": str(stock.folder), "target": str(folder), "images": list(map(str, images))}
        if norm_type == "scale":
            calibration |= run_in_fresh_process({"task": "projector_norm", **job})
            fields["norm_align_scale"] = _scale(calibration["target_norm"], calibration["projector_norm"])
        notes += _write_config(folder, stock, fields)
        copies, norm_file = _lay_out_weights(folder, stock, fields)
        tensors = _check_source_fits(folder, stock)
        clock = time.perf_counter()
        digests = copy_with_digests(copies, folder)
        seconds["copy"], clock = time.perf_counter() - clock, time.perf_counter()
        check_copies(folder, digests)
        verification = {"tensors": tensors, "untouched": len(stock.weights.tensors), "norm": {}, "sha256": digests}
        if norm_file is not None:
            size = stock.config.text_config.hidden_size
            verification["norm"] = check_norm(norm_file, stock.projector_prefix, size, bias)
        seconds["verify"], clock = time.perf_counter() - clock, time.perf_counter()
        write_json(folder / FOLDER / "calibration.json", {**provenance(), **calibration})
        comparison = run_in_fresh_process({"task": "report", **job}) if report else None
        if comparison and not comparison["text_logits_equal"]:
            raise CheckFailed(
                f"The converted model and {stock.folder} give different logits for text without an image; they must "
                "be bit-equal. Nothing was kept. Please report this with the versions of transformers and torch."
            )
        seconds["report"] = time.perf_counter() - clock
    seconds["total"] = time.perf_counter() - started
    return {
        "source": str(stock.folder),
        "target": str(target),
        "norm": fields,
        "calibration": calibration,
        "verification": verification,
        "report": comparison,
        "notes": notes + why_no_report,
        "paths": {"model": str(target), "calibration": str(target / FOLDER / "calibration.json")},
        "seconds": seconds,
    }


def conclusion(summary: dict[str, Any]) -> str:
    """The sentence that a conversion ends with."""
    if summary["report"] is None:
        return "Train this model before use: its agreement with the source was not measured (--report does)."
    agreement = 100 * summary["report"]["top1_agreement"]
    return f"Train this model before use: top-1 agreement with the source is {agreement:.1f} %"


def _check_space(target: Path, stock: Source) -> None:
    parent = next(path for path in target.resolve().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < stock.nbytes:
        raise InputError(
            f"{target} needs {stock.nbytes / 1e9:.1f} GB, but the disk of {parent} has {free / 1e9:.1f} GB free. "
            "Make room or name a target on another disk."
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
        images or sample_photos()
    except InputError as error:
        return False, [f"no report: {error}"]
    return True, []


def _calibrate(stock: Source, target_norm: float | None) -> dict[str, Any]:
    """T and where it came from. InputError for a language model that scales its embeddings, unless T is given."""
    text_config = stock.config.text_config
    table = measure_table(stock.table, text_config.vocab_size, text_config.hidden_size)
    if target_norm is None and table["mean"] is None:
        raise InputError(
            f"The text embedding table {stock.table.name} in {stock.table.file} is all zero (no row has a norm above "
            f"{table['eps']}), so it gives no target norm. Pass --target."
        )
    with quiet_transformers():
        scale = measure_embedding_scale(text_config)
    if target_norm is None and (scale is None or not scale.is_one):
        version = f"transformers {transformers.__version__}"
        if scale is None:
            found = f"the input of its first decoder layer is no multiple of the embedding in {version}"
            advice = "measure the norm of text tokens at that layer and pass it as --target."
        else:
            found = (
                f"in {version} a text token reaches the first decoder layer with {scale.text:.4g} times the norm of "
                f"its row in the table, and a visual token with {scale.image:.4g} times that of the projector's output"
            )
            advice = f"to match the two there, pass --target {table['mean'] * scale.text / scale.image:.6g}."
        raise InputError(
            f"The language model of {stock.folder} ({text_config.model_type}) changes embeddings after the table: "
            f"{found}. The table's mean norm, {table['mean']:.6g}, is therefore not a target on its own; {advice}"
        )
    target = float(target_norm) if target_norm is not None else table["mean"]
    check_gain(target, text_config.hidden_size)
    return {
        "target_norm": target,
        "target_from": "table" if target_norm is None else "given",
        "table": table,
        "embedding_scale": None if scale is None else {"text": scale.text, "image": scale.image},
    }


def _processor_problem(folder: Path, stock: Source) -> str | None:
    """Why the processor of the new folder, which is the source's, cannot be loaded; None if it can."""
    try:
        with quiet_transformers():
            load_processor(folder)
    except InputError as error:
        return str(error).replace(str(folder), str(stock.folder))
    return None


def _scale(target_norm: float, projector_norm: float) -> float:
    scale = target_norm / projector_norm if projector_norm else math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(
            f"The projector's output has the mean norm {projector_norm:g}, which no factor brings to {target_norm:g}. "
            "Use a trained checkpoint, or another --norm."
        )
    return scale


def _write_small_files(folder: Path, stock: Source) -> list[str]:
    """Write everything but config.json and the weights; returns notes for the user."""
    notes = copy_small_files(stock.folder, folder)
    save_code(folder)
    with quiet_transformers():
        return notes + complete_processor_files(folder, stock.config) + make_tokenizer_portable(folder)


def _write_config(folder: Path, stock: Source, fields: dict[str, Any]) -> list[str]:
    """Write the source's config.json with every field it has, and ours; returns notes for the user."""
    notes = []
    config = {
        **stock.raw_config,
        "model_type": "llava_norm_align",
        "architectures": ["LlavaNormAlignForConditionalGeneration"],
        "auto_map": AUTO_MAP,
        **fields,
    }
    text_config = config["text_config"]
    if stock.head_is_tied and not (config.get("tie_word_embeddings") and text_config.get("tie_word_embeddings")):
        config |= {"tie_word_embeddings": True, "text_config": {**text_config, "tie_word_embeddings": True}}
        notes.append("config.json: tie_word_embeddings -> true at the top and in text_config; there is no lm_head")
    with quiet_transformers():
        without_cls = count_additional_tokens(stock.config.vision_config) == 0
        if stock.config.vision_feature_select_strategy == "default" and without_cls:
            notes.append(
                'vision_feature_select_strategy is "default", which drops the first patch of a vision tower without a '
                "CLS token; kept, as the model was trained with it"
            )
    write_json(folder / "config.json", config)
    return notes


def _lay_out_weights(folder: Path, stock: Source, fields: dict[str, Any]) -> tuple[dict[str, Path], Path | None]:
    """Write the norm's file and the index, and link the source's weights: the layout is checked before the copy.

    Returns {file name: source file} of the weights to copy, and the norm's file if there is one.
    """
    norm = norm_tensors(stock, fields)
    total = len(stock.weights.files) + bool(norm)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    if total == 1:
        names = [SINGLE_FILE]
    copies = dict(zip(names, stock.weights.files, strict=False))
    for name, file in copies.items():
        (folder / name).symlink_to(file.resolve())
    norm_file = folder / names[-1] if norm else None
    if norm:
        norm_file.write_bytes(save(norm, metadata={"format": "pt"}))  # save_file would give it mode 0600
    if total > 1:
        write_index(folder, [folder / name for name in names])
    return copies, norm_file


def norm_tensors(stock: Source, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The norm's fp32 tensors [D] under the key layout of the source: every gain T / sqrt(D), every bias 0."""
    if fields["norm_align_type"] not in LEARNED:
        return {}
    size, name = stock.config.text_config.hidden_size, f"{stock.projector_prefix}align_norm"
    tensors = {
        f"{name}.weight": torch.full((size,), fields["norm_align_target"] / math.sqrt(size), dtype=torch.float32)
    }
    if fields["norm_align_bias"]:
        tensors[f"{name}.bias"] = torch.zeros(size)
    return tensors


def _check_source_fits(folder: Path, stock: Source) -> int:
    """The number of tensors of the converted model. InputError if the source's weights are not those of its config."""
    try:
        return check_keys(folder)
    except RuntimeError as error:
        reason = str(error).replace(str(folder), str(stock.folder))
        raise InputError(f"The weights and config.json of {stock.folder} do not belong together. {reason}") from error
    except Exception as error:  # whatever a class raises for values that it was not made for
        raise InputError(
            f"transformers {transformers.__version__} cannot build the model of {stock.folder / 'config.json'} "
            f"({type(error).__name__}: {first_line(error)}). Correct that value, or download the model again."
        ) from error
