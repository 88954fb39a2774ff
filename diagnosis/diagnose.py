"""The diagnosis of a vision-language model: does it have the norm gap, and does it do what the theory says?"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import first_line, load_model, load_processor, resolve_weights
from llava_norm_align.common.results import FOLDER, provenance, weights_sha256, write_json, write_text
from llava_norm_align.common.samples import PHOTOS, sample_photos
from llava_norm_align.diagnosis.attention import attention
from llava_norm_align.diagnosis.compare import compare, read_diagnosis
from llava_norm_align.diagnosis.describe import first_table, later_tables
from llava_norm_align.diagnosis.dynamics import TokensChanged
from llava_norm_align.diagnosis.formats import without_nan
from llava_norm_align.diagnosis.markdown import markdown
from llava_norm_align.diagnosis.measure import Measured, measure, table_norms
from llava_norm_align.diagnosis.plots import write_plots
from llava_norm_align.diagnosis.probe import probe
from llava_norm_align.diagnosis.prompts import blank, make_prompt
from llava_norm_align.diagnosis.published import published_row
from llava_norm_align.diagnosis.structure import Structure, find_structure
from llava_norm_align.diagnosis.tokens import Prompt
from llava_norm_align.diagnosis.verdicts import count_verdicts

QUESTION = (
    "Describe this picture: the objects in it with their colors and positions, any people and what they do, "
    "and where and when it may have been taken."
)
LIMIT = 32  # images
CONTROL_IMAGES = 8  # of the blank control and of the attention; the least number that gets an interval
PROBE_IMAGES = 16


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
    as the norms are there. InputError for a model without visual tokens in its
    residual stream, and for images or a processor that cannot be read.
    """

    def prompts(count: int | None = None, change: Callable[[Image.Image], Image.Image] = lambda image: image):
        for path in images[:count]:
            yield _prompt(model, processor, question, change(open_image(path)), path.name)

    structure = find_structure(model, next(iter(prompts())).inputs)
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
    except InputError as error:
        missing.append(f"The text-only control is missing: {error}")
    if with_attention:
        result["attention"], why = attention(model, structure, _bar(prompts(few), "attention", few))
        missing += why
    if with_probe and not result["ratio"]["mean"]:
        missing.append("The probe is missing: there is no ratio of finite norms that its factor could match.")
    elif with_probe:
        count = min(PROBE_IMAGES, len(images))
        result["probe"] = probe(model, structure, _bar(prompts(count), "probe", count), 1 / result["ratio"]["mean"])
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
    compared = read_diagnosis(Path(other)) if other is not None else None
    files = find_images(images, limit)
    folder = resolve_weights(name, revision)
    target = result_folder(name, folder, out)
    processor = load_processor(folder, trust_remote_code)
    told: list[str] = []
    with _enough_memory(), ThreadPoolExecutor(1) as pool:
        digest = pool.submit(weights_sha256, folder)  # reads the files while the model works
        model = load_model(
            folder,
            dtype,
            device,
            device_map=device_map,
            four_bit=four_bit,
            trust_remote_code=trust_remote_code,
        )

        def on_first(result: dict[str, Any]) -> None:
            told.extend(result["missing"])
            echo(first_table(result) + "\n")

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
        result["images"]["source"] = "scikit-image's photos" if not images else ", ".join(map(str, images))
        result["model"]["weights_sha256"] = digest.result()
    echo(later_tables(result, told))
    if compared is not None:
        echo(compare(result, compared))
    for path in write_diagnosis(result, target, mapped_image(result, files), compared):
        echo(f"Written: {path}")
    return result


def write_diagnosis(
    result: dict[str, Any], folder: Path, image: Image.Image | None = None, other: dict[str, Any] | None = None
) -> list[Path]:
    """Write diagnosis.json, diagnosis.md and the plots into `folder`; their paths. Without matplotlib, no plots."""
    plots = []
    if importlib.util.find_spec("matplotlib") is not None:
        plots = write_plots(result, folder, image, other)
    else:
        result["missing"].append(str(missing_extra("matplotlib", "plots", "A plot")))
    write_json(folder / "diagnosis.json", result)
    write_text(folder / "diagnosis.md", markdown(result, plots))
    return [folder / "diagnosis.json", folder / "diagnosis.md", *plots]


def mapped_image(result: dict[str, Any], files: Sequence[Path]) -> Image.Image | None:
    """The image that the attention map is of."""
    shown = ((result["attention"] or {}).get("map") or {}).get("image")
    return next((open_image(path) for path in files if path.name == shown), None)


def find_images(paths: Sequence[Path], limit: int) -> list[Path]:
    """The first `limit` image files of `paths`: files as they are named, of folders those with an image's suffix."""
    if not paths:
        return sample_photos("A diagnosis", PHOTOS)[:limit]
    suffixes, files = Image.registered_extensions(), []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in suffixes)
        if not found:
            raise InputError(f"The folder {path} of --images has no image file. Name a folder with PNG or JPEG files.")
        files += found
    for path in files[:limit]:
        open_image(path)  # a broken one ends the run before the model is loaded
    return files[:limit]


def result_folder(name: str, folder: Path, out: Path | None) -> Path:
    """Where the result files of model `name` go; the folder is made, or InputError."""
    target = out or (folder / FOLDER if Path(name).is_dir() else Path(f"{name.split('/')[-1]}-{FOLDER}"))
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / ".writable").touch()
        (target / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"The folder {target} cannot be written ({error.strerror}); the result files go there. Name another --out."
        ) from None
    return target


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
        "device": str(model.device),
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
        return make_prompt(processor, question, image, model.device, model.dtype, name)
    except Exception as error:  # every processor has its own way to fail
        what = f"the image {name}" if image is not None else "a text without an image"
        raise InputError(
            f"{type(processor).__name__} cannot make model inputs of {what} and the prompt: {first_line(error)} "
            "Check the processor's files, such as preprocessor_config.json and the chat template."
        ) from error


def _bar(prompts: Iterable[Prompt], what: str, total: int) -> Iterator[Prompt]:
    return tqdm(prompts, desc=what, total=total, unit="image", disable=None)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Turn an out-of-memory error into advice."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "out of memory" not in text and "not enough memory" not in text:
            raise
        raise InputError(
            f"The memory did not suffice: {first_line(error)} Lower what is needed: --dtype bfloat16, --load-in-4bit, "
            "--device-map auto (several GPUs, or a part on the CPU), --no-attention, smaller images, or --device cpu."
        ) from None
