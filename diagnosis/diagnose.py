"""The diagnosis of a vision-language model: does it have the norm gap, and does it do what the theory says?"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import (
    check_placement,
    check_vision_language,
    first_line,
    load_model,
    load_processor,
    out_of_memory,
    resolve_weights,
)
from llava_norm_align.common.results import provenance, weights_sha256
from llava_norm_align.diagnosis.attention import attention
from llava_norm_align.diagnosis.compare import compare, read_diagnosis
from llava_norm_align.diagnosis.describe import first_table, later_tables
from llava_norm_align.diagnosis.dynamics import TokensChanged
from llava_norm_align.diagnosis.files import find_images, mapped_image, result_folder, write_diagnosis
from llava_norm_align.diagnosis.formats import without_nan
from llava_norm_align.diagnosis.measure import Measured, measure, table_norms
from llava_norm_align.diagnosis.probe import probe
from llava_norm_align.diagnosis.prompts import blank, make_prompt
from llava_norm_align.diagnosis.published import published_row
from llava_norm_align.diagnosis.structure import Structure, accepted_inputs, find_structure, input_device
from llava_norm_align.diagnosis.tokens import Prompt
from llava_norm_align.diagnosis.verdicts import count_verdicts

QUESTION = (
    "Describe this picture: the objects in it with their colors and positions, any people and what they do, "
    "and where and when it may have been taken."
)
LIMIT = 32  # images
CONTROL_IMAGES = 8  # of the blank control and of the attention; the least number that gets an interval
PROBE_IMAGES = 16
PROCESSOR_FILES = (
    "the chat template, and patch_size, vision_feature_select_strategy and num_additional_image_tokens in "
    "processor_config.json (of a norm-aligned model, `llava-norm-align doctor` checks them)"
)


@torch.no_grad()
def diagnose_model(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    images: Sequence[Path],
    *,
    name: str,
    revision: str | None = None,
    question: str = QUESTION,
    with_attention: bool = True,
    with_probe: bool = False,
    on_first: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure a loaded model on `images`: the content of diagnosis.json (docs/diagnose.md).

    `name`: what the result calls the model, and by which the paper's row is found. `on_first` gets the result as soon
    as the norms are there. InputError for a model without visual tokens in its residual stream, and for images or a
    processor that cannot be read.
    """

    def prompts(count: int | None = None, change: Callable[[Image.Image], Image.Image] = lambda image: image):
        for path in images[:count]:
            yield _prompt(model, processor, question, change(open_image(path)), path.name)

    if not images:
        raise InputError("There are no images to diagnose with; one or more were expected. Pass some.")
    structure = _find_structure(model, processor, next(prompts()))
    missing = list(structure.missing)
    try:
        measured = measure(model, _bar(prompts(), "norms and layers", len(images)), structure)
        layers = measured.dynamics.layers_summary()
    except TokensChanged as error:
        missing.append(f"The layers are not measured. {error}")
        measured, layers = measure(model, _bar(prompts(), "norms", len(images)), structure, layers=False), []
    result: dict[str, Any] = {
        **provenance(),
        "model": describe_model(model, structure, name, revision),
        "published": published_row(name, model.config.model_type),
        "prompt": question,
        "images": {"count": len(images), "names": [path.name for path in images]},
        "missing": missing,
        "norms": _norms(measured, structure, missing),
        "ratio": measured.ratio(),
        "histograms": {name: measured.norms[name].histogram() for name in ("visual", "text")},
        "layers": layers,
        "verdicts": count_verdicts(layers, len(images)),
        "controls": {},
        "attention": None,
        "probe": None,
    }
    on_first(result)
    few = min(CONTROL_IMAGES, len(images))
    grey = measure(model, _bar(prompts(few, blank), "control: blank images", few), structure, layers=bool(layers))
    result["controls"] = {"blank_image": {"images": few, **_control(grey)}, "text_only": None}
    try:
        text_only = _prompt(model, processor, question, None, "")
        result["controls"]["text_only"] = {
            "prompts": 1,
            **_control(measure(model, [text_only], structure, layers=bool(layers))),
        }
    except Exception as error:  # a processor or a model that needs an image; each has its own way to fail
        missing.append(f"The text-only control is missing: {first_line(error)}")
    if with_attention:
        try:
            result["attention"], why = attention(model, structure, _bar(prompts(few), "attention", few))
        except Exception as error:
            if not out_of_memory(error):
                raise
            why = [f"The attention is not shown: the memory did not suffice for it ({_reason(error)})."]
        missing += why
    if with_probe and not result["ratio"]["mean"]:
        missing.append("The probe is missing: there is no ratio of finite norms that its factor could match.")
    elif with_probe:
        count = min(PROBE_IMAGES, len(images))
        result["probe"] = probe(model, structure, _bar(prompts(count), "probe", count), 1 / result["ratio"]["mean"])
        left_out = count - (result["probe"] or {"images": 0})["images"]
        if left_out:
            missing.append(f"{left_out} of {count} images are left out of the probe: their logits are not finite.")
    return without_nan(result)


def diagnose(
    name: str,
    *,
    images: Sequence[Path] = (),
    limit: int = LIMIT,
    question: str = QUESTION,
    out: Path | None = None,
    other: str | None = None,
    with_attention: bool = True,
    with_probe: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    four_bit: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    echo: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Diagnose the model `name`, a folder or a Hub id; write diagnosis.json, diagnosis.md and plots; the result.

    They go to `out`, by default norm_align/ in the model's folder, or ./NAME-norm_align of a Hub id. `images`: files
    and folders of images, of which the first `limit` are used; default: scikit-image's photos. `other`: a second
    diagnosis.json, which tables and plots show beside this one. `echo` gets the tables.
    """
    if not question.strip():
        raise InputError("The --prompt is empty; a question about an image was expected. Fill it, or leave it out.")
    if limit < 1:
        raise InputError(f"--limit is {limit}, but at least 1 image was expected. Raise it, or leave it out.")
    check_placement(dtype, device, device_map, four_bit)
    compared = read_diagnosis(Path(other)) if other is not None else None
    files = find_images(images, limit)
    folder = resolve_weights(name, revision)
    check_vision_language(folder, trust_remote_code)
    target = result_folder(name, folder, out)
    processor = load_processor(folder, trust_remote_code)
    told: list[str] = []
    with _enough_memory(), ThreadPoolExecutor(1) as pool:
        model = load_model(
            folder,
            dtype,
            device,
            device_map=device_map,
            four_bit=four_bit,
            trust_remote_code=trust_remote_code,
        )
        digest = pool.submit(weights_sha256, folder)  # reads the files, by now in memory, while the model works

        def on_first(result: dict[str, Any]) -> None:
            told.extend(result["missing"])
            echo(first_table(result) + "\n")

        try:
            result = diagnose_model(
                model,
                processor,
                files,
                name=name,
                revision=revision,
                question=question,
                with_attention=with_attention,
                with_probe=with_probe,
                on_first=on_first,
            )
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        result["images"]["source"] = "scikit-image's photos" if not images else ", ".join(map(str, images))
        result["model"]["weights_sha256"] = digest.result()
    echo(later_tables(result, told))
    if compared is not None:
        echo(compare(result, compared))
    for path in write_diagnosis(result, target, mapped_image(result, files), compared):
        echo(f"Written: {path}")
    return result


def describe_model(model: PreTrainedModel, structure: Structure, name: str, revision: str | None) -> dict[str, Any]:
    """The "model" of diagnosis.json; the hash of its weights is added where they lie in files."""
    quantization = getattr(model.config, "quantization_config", None)
    method = getattr(quantization, "quant_method", None) or (quantization or {}).get("quant_method")
    return {
        "name": name,
        "revision": revision,
        "model_type": model.config.model_type,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": None if method is None else str(getattr(method, "value", method)),
        "device": str(input_device(model)),
        "attention_implementation": getattr(model.config, "_attn_implementation", None),
        "decoder_layers": len(structure.layers),
        "hidden_size": model.get_input_embeddings().weight.shape[-1],
        "parameters": model.num_parameters(),
        "projector": structure.projector_name,
        "weights_sha256": None,
    }


def _norms(measured: Measured, structure: Structure, missing: list[str]) -> dict[str, Any]:
    table = table_norms(structure.embeddings)
    if table is None:
        missing.append("The text table is quantised or not in memory, so the norms of its rows are not measured.")
    norms = {name: running.summary() for name, running in measured.norms.items()}
    if norms["text"] is None:
        missing.append("The prompt's tokens do not spell out the question, so none of them counts as text.")
    return {**norms, "text_table": table}


def _control(measured: Measured) -> dict[str, Any]:
    layers = measured.dynamics.layers_summary() if measured.dynamics.images else []
    return {
        "norms": {name: measured.norms[name].summary() for name in ("visual", "text")},
        "layers": [{key: value for key, value in layer.items() if key not in ("a1", "a2")} for layer in layers],
    }


def _prompt(
    model: PreTrainedModel, processor: ProcessorMixin, question: str, image: Image.Image | None, name: str
) -> Prompt:
    try:
        device, accepted = input_device(model), accepted_inputs(model)
        return make_prompt(processor, question, image, device, model.dtype, name, accepted)
    except Exception as error:  # every processor has its own way to fail
        if out_of_memory(error):
            raise
        what = f"the image {name} and the prompt" if image is not None else "the prompt without an image"
        raise InputError(
            f"{type(processor).__name__} cannot make model inputs of {what} ({_reason(error)}). Check the "
            f"processor's files: {PROCESSOR_FILES}."
        ) from error


def _find_structure(model: PreTrainedModel, processor: ProcessorMixin, prompt: Prompt) -> Structure:
    try:
        return find_structure(model, prompt.inputs)
    except Exception as error:  # every model has its own way to fail
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        raise InputError(
            f"{type(model).__name__} fails on what {type(processor).__name__} makes of the image {prompt.name} and "
            f"the prompt ({_reason(error)}). If image tokens are miscounted, check {PROCESSOR_FILES}; else run again "
            "with --debug to see where."
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def _bar(prompts: Iterable[Prompt], what: str, total: int) -> Iterator[Prompt]:
    return tqdm(prompts, desc=what, total=total, unit="image", disable=None)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Turn an out-of-memory error into advice."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise InputError(
            f"The memory did not suffice ({_reason(error)}). Lower what is needed: pass --no-attention, --dtype "
            "bfloat16, --load-in-4bit, --device-map auto (several GPUs, or a part on the CPU) or --device cpu, or "
            "smaller images."
        ) from error
