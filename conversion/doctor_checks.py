"""The doctor's checks of weights, norm, calibration and code. No weight but the norm's is read."""

import json
import math
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import check_readable_folder, first_line, load_config
from llava_norm_align.common.results import FOLDER
from llava_norm_align.common.weights import INDEX_FILE, StoredTensor, StoredWeights, read_json, read_weights
from llava_norm_align.conversion import verify
from llava_norm_align.conversion.processor_fields import JSON_FILES
from llava_norm_align.conversion.source import TABLE_NAME, check_head
from llava_norm_align.modeling.families import FAMILIES
from llava_norm_align.modeling.modeling_llava_norm_align import save_code

CONFIG_FILE = "config.json"
READ_FILES = (CONFIG_FILE, *JSON_FILES, "video_preprocessor_config.json", "added_tokens.json", "vocab.json")
LEARNED = ("layer_norm", "rms_norm")  # the types with tensors
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin*")
NOTHING = "norm type none: there is nothing to check"


class Failed(Exception):
    """A check failed; the message is its detail."""


class NotRun(Exception):
    """A check could not be made; the message is the reason."""


class Patient:
    """A norm-aligned folder while it is examined: what was read of it, and which checks failed so far."""

    def __init__(self, folder: Path):
        """InputError if `folder` holds no model, or one that is not norm-aligned."""
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}. Name a folder that llava-norm-align convert wrote.")
        check_readable_folder(folder)
        self.folder, self.failed = folder, set()
        self.files: dict[str, dict[str, Any]] = {}  # the JSON files by name
        self.broken: dict[str, str] = {}  # of those that are none: what is wrong
        for name in READ_FILES:
            if (folder / name).is_file():
                try:
                    self.files[name] = read_json(folder / name, "a JSON object")
                except InputError as error:
                    self.broken[name] = str(error)
        if CONFIG_FILE not in self.broken:
            self._model_class = _find_class(folder, load_config(folder)["model_type"])

    def require(self, *numbers: int) -> None:
        """NotRun if one of these checks failed."""
        for number in numbers:
            if number in self.failed:
                raise NotRun(f"needs check {number}")

    def read(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the folder, empty if there is no such file."""
        if name in self.broken:
            raise NotRun("needs check 1")
        return self.files.get(name, {})

    @property
    def model_class(self) -> type[PreTrainedModel]:
        self.read(CONFIG_FILE)
        return self._model_class

    @cached_property
    def config(self) -> PretrainedConfig:
        content = {
            key: value for key, value in self.read(CONFIG_FILE).items() if key not in ("model_type", "auto_map")
        }
        try:
            with verify.quiet_transformers():
                return self.model_class.config_class.from_dict(content)
        except Exception:  # config classes raise whatever their fields lead to; check 2 meets the same
            raise NotRun("needs check 2") from None

    @cached_property
    def weights(self) -> StoredWeights:
        return read_weights(self.folder)

    @cached_property
    def norm(self) -> dict[str, torch.Tensor]:
        """The norm's tensors, "weight" and "bias" if it has one, as they are stored."""
        found = [tensor for name, tensor in self.weights.tensors.items() if ".align_norm." in name]
        return {tensor.name.rpartition(".")[2]: _read_tensor(tensor) for tensor in found}


def _find_class(folder: Path, model_type: str) -> type[PreTrainedModel]:
    ours = {cls.config_class.model_type: cls for cls in FAMILIES.values()}
    if model_type in ours:
        return ours[model_type]
    if model_type in FAMILIES:
        raise InputError(
            f"{folder} is a stock model (model_type {model_type} in config.json), not converted or with its factor "
            "folded in (--fold): it has no norm to examine. Run: llava-norm-align convert SOURCE TARGET, and examine "
            "TARGET."
        )
    raise InputError(
        f"{folder / CONFIG_FILE} says model_type {model_type}, but one of {', '.join(ours)} was expected. "
        "Name a folder that llava-norm-align convert wrote."
    )


def _read_tensor(tensor: StoredTensor) -> torch.Tensor:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        content = bytearray(file.read(tensor.nbytes))
    if tensor.dtype != "F32":
        raise Failed(f"{tensor.name} in {tensor.file.name} is stored as {tensor.dtype}; the norm must be in F32.")
    return torch.frombuffer(content, dtype=torch.float32)


def check_files(patient: Patient) -> str:
    """Every weight file opens and is listed, and every JSON file is one."""
    faults = list(patient.broken.values())
    try:
        weights = patient.weights
    except InputError as error:
        raise Failed(" ".join([*faults, str(error)])) from None
    if weights.pickled:
        faults.append(f"The weights are pickled ({weights.files[0].name}), but safetensors was expected.")
    listed = {file.name for file in weights.files} | ({INDEX_FILE} if weights.index else set())
    present = {path.name for pattern in (*WEIGHT_PATTERNS, INDEX_FILE) for path in patient.folder.glob(pattern)}
    if stray := sorted(present - listed):
        faults.append(f"Stray weight files beside the model's: {', '.join(stray)}. Remove them.")
    if faults:
        raise Failed(" ".join(faults))
    size = sum(file.stat().st_size for file in weights.files)
    return (
        f"{len(weights.files)} weight file(s) with {len(weights.tensors):,} tensors, {size / 1e9:.2f} GB; "
        f"{len(patient.files)} JSON files"
    )


def check_keys(patient: Patient, count: int | None = None) -> str:
    """transformers finds every tensor of the model and no other, and the image token has a row in the table.

    `count`: the number of tensors, if the caller has just had them compared.
    """
    patient.require(1)
    try:
        count = count or verify.check_keys(patient.folder, patient.model_class)
    except RuntimeError as error:
        raise Failed(" ".join(str(error).split())[:1000]) from None
    except Exception as error:  # whatever a class raises for values that it was not made for
        raise Failed(
            f"transformers {transformers.__version__} cannot build the model of {CONFIG_FILE} "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    config = patient.config
    if not image_token_in_table(config):
        rows = config.text_config.vocab_size
        raise Failed(
            f"The image token id in {CONFIG_FILE} is {config.image_token_id!r}; the text table has {rows} rows."
        )
    weights = read_weights(patient.folder)
    table = next((tensor for name, tensor in weights.tensors.items() if TABLE_NAME.fullmatch(name)), None)
    if table is not None:
        check_head(patient.folder, patient.read(CONFIG_FILE), config, weights, table)
    return f"{count:,} tensors as transformers {transformers.__version__} expects them"


def image_token_in_table(config: PretrainedConfig) -> bool:
    return isinstance(config.image_token_id, int) and 0 <= config.image_token_id < config.text_config.vocab_size


def check_norm(patient: Patient) -> str:
    """The norm's tensors [D] are fp32 and finite, and its gain is not all zero."""
    patient.require(1, 2)
    config = patient.config
    if config.norm_align_type == "none":
        return NOTHING
    if config.norm_align_type == "scale":  # the configuration's class has checked it
        return f"norm type scale: the factor is {config.norm_align_scale:g}, and there are no tensors"
    for name, tensor in patient.norm.items():
        if not torch.isfinite(tensor).all():
            raise Failed(f"align_norm.{name} has NaN or inf in {int((~torch.isfinite(tensor)).sum())} channel(s).")
    if not patient.norm["weight"].any():
        raise Failed("align_norm.weight is all zero, so the model sees no image.")
    return f"{' and '.join(patient.norm)} in fp32, finite, {len(patient.norm['weight'])} channels"


def check_calibration(patient: Patient) -> str:
    """An untrained norm starts where config.json and calibration.json say; of a trained one the drift is reported."""
    patient.require(1, 2, 3)
    config = patient.config
    calibration = _read_calibration(patient.folder)
    if config.norm_align_type == "none":
        return NOTHING
    if calibration is not None:
        _compare_target("norm_align_target", config.norm_align_target, calibration["target_norm"])
    if config.norm_align_type == "scale":
        if calibration is not None and calibration.get("projector_norm"):
            factor = calibration["target_norm"] / calibration["projector_norm"]
            _compare_target("norm_align_scale", config.norm_align_scale, factor)
        return f"the factor is {config.norm_align_scale:g}{_source(calibration)}"
    gain, bias = (patient.norm.get(name, torch.zeros(1)).double() for name in ("weight", "bias"))
    target = config.norm_align_target
    start = 1.0 if target is None else target / math.sqrt(len(gain))
    if gain.min() < gain.max() or bias.any():
        mean = gain.abs().mean().item()
        drift = f"mean|g| is {mean:.4g}, {mean / start:.3g} times its start {start:.4g}"
        return f"trained: {drift}; ||b|| is {bias.norm():.4g}"
    if not math.isclose(gain[0].item(), start, rel_tol=1e-6):
        raise Failed(
            f"align_norm.weight is {gain[0]:g} on every channel, so it is untrained, but norm_align_target {target} "
            f"in {CONFIG_FILE} gives {start:g} (T / sqrt(D))."
        )
    return f"untrained: the gain is {start:.4g} on every channel{_source(calibration)}"


def _read_calibration(folder: Path) -> dict[str, Any] | None:
    path = folder / FOLDER / "calibration.json"
    if not path.is_file():
        return None
    try:
        calibration = read_json(path, "where the target norm comes from")
    except InputError as error:
        raise Failed(str(error)) from None
    for name, needed in (("target_norm", True), ("projector_norm", False)):
        value = calibration.get(name)
        if (needed or value is not None) and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise Failed(f"{name} in {path} is {json.dumps(value)[:80]}; a positive number was expected.")
    return calibration


def _compare_target(field: str, found: float | None, expected: float) -> None:
    if found is None or not math.isclose(found, expected, rel_tol=1e-6):
        raise Failed(f"{field} in {CONFIG_FILE} is {found}, but {FOLDER}/calibration.json gives {expected:g}.")


def _source(calibration: dict[str, Any] | None) -> str:
    return ", as calibrated" if calibration else f"; there is no {FOLDER}/calibration.json to compare with"


def check_code(patient: Patient) -> str:
    """The code files are byte for byte this package's, and nothing else would run when the model is loaded."""
    faults = [f"{name} {what}" for name, what in code_faults(patient).items()]
    if patient.read(CONFIG_FILE).get("auto_map") != patient.model_class.config_class.AUTO_MAP:
        faults.append(f"auto_map in {CONFIG_FILE} is not the package's")
    if (patient.folder / "custom_generate" / "generate.py").exists():
        faults.append("custom_generate/generate.py is not the package's, and transformers would run it")
    if faults:
        raise Failed("; ".join(faults))
    return f"{', '.join(sorted(code_files(patient.model_class)))} and auto_map"


def code_files(model_class: type[PreTrainedModel]) -> dict[str, bytes]:
    """{name: content} of the code that belongs into a folder of `model_class`."""
    with tempfile.TemporaryDirectory() as scratch:
        save_code(scratch, model_class)
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir()}


def code_faults(patient: Patient) -> dict[str, str]:
    """{name: what is wrong} of the folder's code files that are not the package's."""
    faults = {}
    for name, content in sorted(code_files(patient.model_class).items()):
        path = patient.folder / name
        if not path.is_file():
            faults[name] = "is missing"
        elif path.read_bytes() != content:
            faults[name] = "differs from the package's"
    return faults
