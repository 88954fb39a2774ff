"""What `train` reads: a recipe (YAML) and `--field value` pairs, as two dataclasses. Nothing is loaded here."""

import dataclasses
import difflib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import SFTConfig

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.loading import first_line
from llava_norm_align.trl_recipes.config import LlavaSFTConfig

RECIPES = Path(__file__).with_name("recipes")
PROMPT_FORMATS = ("plain", "chat")
ASPECT_RATIOS = ("square", "pad")
EASY_VQA = ("easy-vqa", "easy-vqa-yes-no")  # data_path of the package's questions, without or with those of yes or no
TRAIN_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class ScriptArguments:
    """The model, the data, and how they are brought together. The training itself: LlavaSFTConfig."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A LLaVA: folder, Hub id, or 'micro'."})
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    projector: str | None = field(
        default=None, metadata={"help": "File with a trained projector: projector.safetensors or mm_projector.bin."}
    )
    fresh_projector: bool = field(
        default=False, metadata={"help": "Start from a new projector, drawn from `seed`; a norm stays as it is."}
    )
    dtype: str | None = field(
        default=None,
        metadata={"help": "Of frozen parts; trained ones are float32. None: as stored, but bfloat16 for float16."},
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Such as sdpa, eager, flash_attention_2."})
    data_path: str | None = field(
        default=None, metadata={"help": "Rows in LLaVA's JSON, easy-vqa or easy-vqa-yes-no."}
    )
    image_folder: str | None = field(default=None, metadata={"help": "The folder that image paths start from."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Instead of data_path: a conversational dataset (TRL), folder or Hub id."}
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Its split for training."})
    skip_bad_rows: bool = field(
        default=False, metadata={"help": "Train without the rows in which check-data finds a fault."}
    )
    prompt_format: str = field(
        default="chat", metadata={"help": "plain: image, then answer (LLaVA's stage 1). chat: conversations."}
    )
    image_aspect_ratio: str = field(
        default="square", metadata={"help": "pad: to a square with the mean colour. square: as the processor does."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters in the language model."})
    lora_r: int = field(default=128, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=256, metadata={"help": "Their scale is lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "On the adapters' inputs."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names or a pattern. None: every linear layer of the language model."}
    )
    load_in_4bit: bool = field(default=False, metadata={"help": "Language model in 4 bits (QLoRA, NF4)."})
    dry_run: bool = field(default=False, metadata={"help": "Two steps, an estimate; nothing is kept."})
    resume: bool = field(default=False, metadata={"help": "From the newest whole checkpoint in output_dir."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the training that is in output_dir."})

    def __post_init__(self):
        for name, choices in (
            ("prompt_format", PROMPT_FORMATS),
            ("image_aspect_ratio", ASPECT_RATIOS),
            ("dtype", (None, *TRAIN_DTYPES)),
        ):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}; one of {', '.join(filter(None, choices))} was expected."
                )
        if self.model_name_or_path is None:
            raise InputError("There is no model to train. Name its folder or Hub id with --model_name_or_path.")
        if (self.data_path is None) == (self.dataset_name is None):
            found = (
                "Both data_path and dataset_name are" if self.data_path else "Neither data_path nor dataset_name is"
            )
            raise InputError(f"{found} given. Name one: LLaVA's JSON (and image_folder), or a TRL dataset.")
        if self.image_folder is None and self.data_path is not None and self.data_path not in EASY_VQA:
            raise InputError(
                f"data_path is {self.data_path}, but the folder of its images is missing. Pass --image_folder."
            )
        if self.projector is not None and self.fresh_projector:
            raise InputError("projector and fresh_projector exclude each other: a trained one, or a new one.")
        if self.load_in_4bit and not self.use_peft:
            raise InputError("load_in_4bit is true, but weights in 4 bits cannot be trained. Set use_peft: true, too.")
        if self.lora_r < 1 or not 0 <= self.lora_dropout < 1:
            raise InputError(
                f"lora_r is {self.lora_r} and lora_dropout {self.lora_dropout}, but a rank of 1 or more and a share "
                "of 0 to below 1 were expected. Correct them."
            )
        if self.dry_run and self.resume:
            raise InputError("--dry_run starts anew and keeps nothing, so --resume has no use with it. Leave one out.")
        if self.resume and self.overwrite:
            raise InputError("--resume keeps what is in output_dir, and --overwrite replaces it. Leave one out.")


def parse(arguments: Sequence[str]) -> tuple[ScriptArguments, LlavaSFTConfig]:
    """`RECIPE.yaml [--field value ...]` as dataclasses; a field on the command line wins over the recipe's.

    RECIPE.yaml is a file or the name of a shipped recipe. InputError for what cannot be read, an unknown field, a
    value of another type, or fields that do not go together.
    """
    if not arguments or arguments[0].startswith("-"):
        raise InputError(
            f"train needs a recipe as its first argument: a YAML file, or one of {', '.join(recipe_names())} (in "
            f"{RECIPES}). Every field of a recipe can be set after it, as --field value."
        )
    recipe, *options = arguments
    fields = read_recipe(find_recipe(recipe))
    _check_names(fields, recipe)
    _check_names([option.lstrip("-").partition("=")[0] for option in options if option.startswith("--")], "train")
    parser = _Parser((ScriptArguments, LlavaSFTConfig), allow_abbrev=False)
    parser.set_defaults(**{name: None for name, value in fields.items() if value is None})
    words = [word for name, value in fields.items() if value is not None for word in _as_words(name, value)]
    try:
        script, config, left = parser.parse_args_into_dataclasses([*words, *options], return_remaining_strings=True)
    except (ValueError, TypeError, ImportError) as error:  # what transformers and TRL refuse
        if "deepspeed" in str(error) and importlib.util.find_spec("deepspeed") is None:
            raise missing_extra("deepspeed", "deepspeed", "ZeRO") from None
        raise InputError(f"The fields of {recipe} do not go together: {str(error).strip()}") from error
    if left:
        raise InputError(f"{left[0]!r} belongs to no field. Write --field value, with one value for most fields.")
    check_together(script, config)
    return script, config


def _check_reports(names: Sequence[str]) -> None:
    """InputError unless what report_to names is known and installed."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise InputError(f"report_to names {name!r}; none, or of {known}, was expected. Correct it.")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise InputError(
                f"report_to is {name}, which cannot be used here: {first_line(error)} Install it, or set report_to: "
                "none."
            ) from None


def usage() -> str:
    """The recipes, and the fields that are not TRL's or have another default there."""
    theirs = {f.name: f.default for f in dataclasses.fields(SFTConfig)}
    own = [f for f in dataclasses.fields(ScriptArguments)]
    own += [f for f in dataclasses.fields(LlavaSFTConfig) if f.name not in theirs or f.default != theirs[f.name]]
    lines = [
        "usage: train RECIPE.yaml [--field value ...]",
        "",
        f"Recipes, in {RECIPES}:",
        *(f"  {name:14}{_first_line(RECIPES / f'{name}.yaml')}" for name in recipe_names()),
        "",
        "Fields of a recipe or of the command line, besides those of TRL's SFTConfig and of transformers'",
        "TrainingArguments (learning_rate, max_steps, save_steps, report_to, push_to_hub, ...):",
    ]
    for f in own:
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        lines.append(f"  --{f.name} ({json.dumps(default)}): {f.metadata['help']}")
    return "\n".join(lines)


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def recipe_names() -> list[str]:
    """The recipes that the package brings."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """The file of a recipe: itself, or the shipped one of that name. InputError if there is none."""
    shipped = RECIPES / f"{Path(recipe).stem}.yaml"
    for path in (Path(recipe), shipped if len(Path(recipe).parts) == 1 else None):
        if path is not None and path.is_file():
            return path
    raise InputError(
        f"There is no recipe {recipe}. Name a YAML file, or one of {', '.join(recipe_names())} (in {RECIPES})."
    )


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields of a recipe. InputError unless it is a YAML mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{path} holds no fields. Lines of the form `field: value` were expected.")
    return content


class _Loader(yaml.SafeLoader):
    """YAML in which a field may stand once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names = [key.value for key, _ in node.value]
        twice = next((key for key, _ in reversed(node.value) if names.count(key.value) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the field {twice.value} stands twice, last in line {twice.start_mark.line + 1}.")
        return super().construct_mapping(node, deep)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[0].upper()}{message[1:]}. `field: value` or --field value was expected.")


def _known_fields() -> set[str]:
    return {f.name for kind in (ScriptArguments, LlavaSFTConfig) for f in dataclasses.fields(kind) if f.init}


def _check_names(names: Any, where: str) -> None:
    known = _known_fields()
    for name in names:
        plain = name.replace("-", "_")
        if plain in known or plain.removeprefix("no_") in known:
            continue
        near = difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0.5)
        meant = f" The nearest is {near[0]}." if near else ""
        raise InputError(f"{where} has no field {name!r}.{meant} All fields: docs/training.md, and TRL's SFTConfig.")


def _as_words(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def check_together(script: ScriptArguments, config: LlavaSFTConfig) -> None:
    """InputError for fields of both that do not go together."""
    if script.dtype == "bfloat16" and not config.bf16:
        raise InputError(
            "dtype is bfloat16, but bf16 is false, so float32 weights would meet bfloat16 ones. Set bf16: true, or "
            "dtype: float32."
        )
    if config.resume_from_checkpoint:
        raise InputError("resume_from_checkpoint is set, but train resumes with --resume, from output_dir. Use that.")
    if config.packing or config.padding_free:
        raise InputError("packing and padding_free join rows, which TRL cannot do with images. Leave them out.")
    if str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no":
        raise InputError(
            "eval_strategy is set, but train has no rows to evaluate on. Leave it out, and test the finished model."
        )
    _check_reports(config.report_to)
    if config.save_projector_only and (script.use_peft or not set(config.trained_parts) <= {"projector", "norm"}):
        what = "LoRA adapters are" if script.use_peft else f"{', '.join(config.trained_parts)} are"
        raise InputError(
            f"save_projector_only is true, but {what} trained, which its checkpoints would lose. Set it to false."
        )
    if config.group_by_modality_length and script.dataset_name is not None:
        raise InputError(
            "group_by_modality_length is true, but only rows of LLaVA's JSON (data_path) tell their length. Set it "
            "to false, or name a data_path."
        )
    if script.use_peft and config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage == 3:
        raise InputError(
            "use_peft is true under ZeRO-3, whose sharded weights PEFT's modules_to_save cannot copy, so projector "
            "and norm would not be trained. Use ZeRO-2, DDP or FSDP2."
        )
    if (
        script.use_peft
        and config.trained_parts != LlavaSFTConfig.__dataclass_fields__["trained_parts"].default_factory()
    ):
        logging.getLogger(__name__).warning(
            "trained_parts is not used with use_peft: adapters, projector and norm are trained."
        )
