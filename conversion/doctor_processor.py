"""The doctor's checks of processor, chat template and tokenizer: by their files; only the tokenizer may be loaded."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoTokenizer, PretrainedConfig
from transformers.utils.chat_template_utils import render_jinja_template

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import first_line
from llava_norm_align.conversion.doctor_checks import CONFIG_FILE, Failed, NotRun, Patient, image_token_in_table
from llava_norm_align.conversion.processor_fields import (
    IMAGE_PROCESSOR_FILE,
    PROCESSOR_FILE,
    TOKENIZER_FILE,
    check_size,
    complete_processor_files,
    count_additional_tokens,
    image_token,
    make_tokenizer_portable,
    token_ids,
)
from llava_norm_align.conversion.tokenizer_class import match_stock_tokenizer
from llava_norm_align.conversion.verify import quiet_transformers

TOKENIZER_FILES = ("tokenizer.json", TOKENIZER_FILE, "tokenizer.model", "vocab.json")
TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")  # the first wins, in both lines
CROPPING = ("CLIPImageProcessor", "LlavaImageProcessor", "LlavaNextImageProcessor")  # do_center_crop is their default


def has_processor(patient: Patient) -> bool:
    return bool(patient.read(IMAGE_PROCESSOR_FILE) or patient.read(PROCESSOR_FILE).get("image_processor"))


def has_tokenizer(patient: Patient) -> bool:
    return any((patient.folder / name).is_file() for name in TOKENIZER_FILES)


def check_processor(patient: Patient) -> str:
    """Processor, chat template and config.json agree on the image token and on how many a prompt gets."""
    for file in (PROCESSOR_FILE, IMAGE_PROCESSOR_FILE, TOKENIZER_FILE):
        patient.read(file)
    if not has_processor(patient):
        raise NotRun(f"the folder has no image processor ({IMAGE_PROCESSOR_FILE})")
    token = image_token(patient.folder)
    faults = [
        *_foreign_code(patient, PROCESSOR_FILE, IMAGE_PROCESSOR_FILE),
        *processor_changes(patient),
        *_token_faults(patient, token),
        *_template_faults(patient, token),
    ]
    for file, settings in _image_settings(patient):
        faults += _size_faults(file, settings, patient.config)
    if faults:
        raise Failed("; ".join(faults))
    return f"{token} is id {patient.config.image_token_id}; the chat template renders one per image"


def _foreign_code(patient: Patient, *files: str) -> list[str]:
    """Code that transformers would run with trust_remote_code and that is not ours."""
    return [f"{file}: auto_map names other code" for file in files if patient.read(file).get("auto_map")]


def processor_changes(patient: Patient) -> list[str]:
    """What completing the processor's files would change, in words."""
    try:
        for file, settings in _image_settings(patient):
            check_size(patient.folder / file, settings.get("size"))
            check_size(patient.folder / file, settings.get("crop_size"))
        with (
            copied(patient.folder, PROCESSOR_FILE, IMAGE_PROCESSOR_FILE, TOKENIZER_FILE) as copy,
            quiet_transformers(),
        ):
            return complete_processor_files(copy, patient.config)
    except InputError as error:
        return [str(error)]


def tokenizer_changes(patient: Patient) -> list[str]:
    """What `mend_tokenizer` would change, in words."""
    with copied(patient.folder, TOKENIZER_FILE, "tokenizer.json") as copy:
        return mend_tokenizer(copy, patient)


def mend_tokenizer(folder: Path, patient: Patient) -> list[str]:
    """Let both lines load the tokenizer in `folder` and read texts as the stock model's; returns what was changed."""
    kind = patient.model_class.config_class.model_type.removesuffix("_norm_align")
    return make_tokenizer_portable(folder) + match_stock_tokenizer(folder, kind)


@contextmanager
def copied(folder: Path, *names: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(scratch, name))
        yield Path(scratch)


def _image_settings(patient: Patient) -> list[tuple[str, dict[str, Any]]]:
    """(file, settings) of the image processor; some folders have it in two files."""
    nested = patient.read(PROCESSOR_FILE).get("image_processor")
    found = [(IMAGE_PROCESSOR_FILE, patient.read(IMAGE_PROCESSOR_FILE)), (PROCESSOR_FILE, nested)]
    return [(file, settings) for file, settings in found if isinstance(settings, dict) and settings]


def _token_faults(patient: Patient, token: str) -> list[str]:
    if not patient.read("tokenizer.json"):
        return []
    try:
        ids = token_ids(patient.folder / "tokenizer.json")
    except InputError:
        raise NotRun("needs check 7") from None
    expected = patient.config.image_token_id
    if not image_token_in_table(patient.config):
        raise NotRun("needs check 2")
    if ids.get(token) == expected:
        return []
    found = f"the id {ids[token]}" if token in ids else "no id"
    return [f"tokenizer.json gives {token} {found}, but the image token id in {CONFIG_FILE} is {expected}"]


def _find_template(patient: Patient) -> tuple[str, Any] | None:
    """(file, template) that the processor takes, as transformers looks for it."""
    if template := patient.read(PROCESSOR_FILE).get("chat_template"):
        return PROCESSOR_FILE, template
    json_file, jinja_file = TEMPLATE_FILES
    if (patient.folder / json_file).is_file():
        return json_file, patient.read(json_file).get("chat_template")
    if (patient.folder / jinja_file).is_file():
        return jinja_file, (patient.folder / jinja_file).read_text(encoding="utf-8", errors="replace")
    return None


def _template_faults(patient: Patient, token: str) -> list[str]:
    """A template that is missing, does not render, or makes of 0, 1 or 2 images another number of image tokens."""
    found = _find_template(patient)
    if found is None:
        return [f"there is no chat template ({TEMPLATE_FILES[1]})"]
    file, template = found
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        return [f"{file} holds no chat template as text"]
    named = {**patient.read("special_tokens_map.json"), **patient.read(TOKENIZER_FILE)}
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in named.items()
        if name.endswith("_token") and (isinstance(value, str) or isinstance(value, dict) and "content" in value)
    }
    for images in (0, 1, 2):
        content = [{"type": "image"}] * images + [{"type": "text", "text": "hello"}]
        try:
            rendered, _ = render_jinja_template(
                conversations=[[{"role": "user", "content": content}]],
                chat_template=template,
                add_generation_prompt=True,
                **special,
            )
        except Exception as error:  # a template can raise anything
            return [f"{file} does not render a question ({type(error).__name__}: {first_line(error)})"]
        count = rendered[0].count(token)
        if count != images:
            return [f"{file} renders {count} {token} for {images} image(s)"]
        if "hello" not in rendered[0]:
            return [f"{file} leaves out the text of a question"]
    return []


def _size_faults(file: str, settings: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Images of a size that the vision tower does not take, or other tiles than the model's."""
    grids = [settings.get("image_grid_pinpoints"), getattr(config, "image_grid_pinpoints", None)]
    if all(grids) and [list(grid) for grid in grids[0]] != [list(grid) for grid in grids[1]]:
        return [f"{file}: image_grid_pinpoints are not those of {CONFIG_FILE}"]
    size, tower = _output_size(settings), config.vision_config
    if size is None or tower_takes(tower, size) or count_additional_tokens(tower) is None:
        return []
    sides = f"{size[0]} x {size[1]}"
    return [f"{file}: images become {sides}, which the vision tower (image_size {tower.image_size}) does not take"]


def _output_size(settings: dict[str, Any]) -> tuple[int, int] | None:
    """(height, width) of what the image processor makes of any image; None if that depends on the image."""
    crops = settings.get("do_center_crop", settings.get("image_processor_type", "").startswith(CROPPING))
    size = settings.get("crop_size") if crops else settings.get("size")
    if isinstance(size, int):
        return (size, size) if crops else None
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["height"], size["width"]
    return None


def tower_takes(vision_config: PretrainedConfig, size: tuple[int, int]) -> bool:
    """Whether a vision tower accepts images of this (height, width): its own size, or tried without memory."""
    own = vision_config.image_size
    if size == ((own, own) if isinstance(own, int) else tuple(own)):
        return True
    try:
        with quiet_transformers(), torch.device("meta"), torch.no_grad():
            tower = AutoModel.from_config(vision_config).eval()
            tower(pixel_values=torch.empty(1, vision_config.num_channels, *size))
    except Exception:  # whatever a tower raises for a size that is not its own
        return False
    return True


def check_tokenizer(patient: Patient, load_elsewhere: Callable[[], list[str]] | None) -> str:
    """The tokenizer loads in both lines: by rules, and with `load_elsewhere` also here and in what that tries."""
    if not has_tokenizer(patient):
        raise NotRun("the folder has no tokenizer")
    faults = [*_foreign_code(patient, TOKENIZER_FILE), *tokenizer_changes(patient)]
    if patient.read("tokenizer.json"):
        try:
            ids = token_ids(patient.folder / "tokenizer.json")
            token, largest = max(ids.items(), key=lambda item: item[1])
            rows = patient.config.text_config.vocab_size
            if largest >= rows:
                faults.append(
                    f"tokenizer.json gives {token!r} the id {largest}, but the text table has {rows} rows: a prompt "
                    "with it fails. Add the row, or take the token out"
                )
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise Failed("; ".join(faults))
    if load_elsewhere is None:
        return "transformers 4.57 and 5 both know what its files name; it was not loaded"
    try:
        with quiet_transformers():
            name = type(AutoTokenizer.from_pretrained(patient.folder, trust_remote_code=False)).__name__
    except ImportError as error:
        raise NotRun(f"not loaded here: {first_line(error)}") from None
    except Exception as error:  # every tokenizer class has its own way to fail
        raise Failed(f"transformers {transformers.__version__}: {type(error).__name__}: {first_line(error)}") from None
    return "; ".join([f"{name} in transformers {transformers.__version__}", *load_elsewhere()])
