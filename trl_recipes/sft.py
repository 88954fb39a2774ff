"""Train a LLaVA by a recipe: `python -m llava_norm_align.trl_recipes.sft RECIPE.yaml [--field value ...]`.

Also started by `llava-norm-align train`, and on many devices by `accelerate launch -m`. See docs/training.md.
"""

import dataclasses
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import PreTrainedModel

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import (
    check_vision_language,
    first_line,
    load_model,
    load_processor,
    resolve_model,
)
from llava_norm_align.common.program import run_program
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.conversion.projector_file import load_projector, read_projector
from llava_norm_align.data.images import with_square_images
from llava_norm_align.data.templates import training_template, without_marks
from llava_norm_align.trl_recipes.arguments import TRAIN_DTYPES, ScriptArguments, parse, usage
from llava_norm_align.trl_recipes.collator import PLAIN, LlavaCollator
from llava_norm_align.trl_recipes.config import LlavaSFTConfig
from llava_norm_align.trl_recipes.first_screen import FirstScreen
from llava_norm_align.trl_recipes.groups import part_of
from llava_norm_align.trl_recipes.lora import four_bit_config, lora_config
from llava_norm_align.trl_recipes.output import check_output, finish, remove_if_empty, remove_training, stored_dtype
from llava_norm_align.trl_recipes.rows import load_rows
from llava_norm_align.trl_recipes.trainer import LlavaTrainer, check_family

MICRO = "micro"  # as model_name_or_path: micro-LLaVA from the user's cache, built if it is not there


def run(arguments: Sequence[str], echo: Callable[[str], None] = print) -> Path | None:
    """Train as `arguments` say (`RECIPE.yaml [--field value ...]`); returns the folder of the finished model.

    With --help among them, recipes and fields are told and nothing else is done.

    InputError for bad input, CheckFailed if the training cannot go on; checkpoints that were saved stay.
    """
    if {"--help", "-h"} & set(arguments):
        echo(usage())
        return None
    script, config = parse(arguments)
    if not PartialState().is_main_process:
        echo = _silent
    output = Path(config.output_dir).resolve()
    existed = output.exists()
    check_output(output, script)
    with ExitStack() as stack:
        stack.callback(remove_if_empty, output, existed)
        if script.dry_run:
            parent = next(folder for folder in output.parents if folder.is_dir())
            config.output_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix=".dry-run-", dir=parent))
            config.push_to_hub, config.report_to = False, []
        source, trainer = build(script, config, echo)
        if script.overwrite and not script.dry_run and PartialState().is_main_process:
            remove_training(output)
        PartialState().wait_for_everyone()
        try:
            with warnings.catch_warnings():
                # PEFT 0.21 asks transformers for it
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                trainer.train(resume_from_checkpoint=script.resume or None)
        except InputError as error:  # of a process that reads rows: with its traceback as text
            raise InputError(str(error).rpartition("InputError: ")[2].strip()) from None
        if not script.dry_run:
            finish(trainer, source)
            echo(f"Written: {config.output_dir}")
    return Path(config.output_dir)


def build(
    script: ScriptArguments, config: LlavaSFTConfig, echo: Callable[[str], None] = print
) -> tuple[Path, LlavaTrainer]:
    """The folder of the model, and the trainer. What can be refused before the weights are read is."""
    state = PartialState()
    recipe = _changed(script) | {"chat_template_path": config.chat_template_path}
    with state.main_process_first():
        source = cached_micro() if script.model_name_or_path == MICRO else _resolve(script)
    check_family(check_vision_language(source)["model_type"])
    notes = []
    if stored_dtype(source) == "float16":
        notes.append("the checkpoint is float16, in which gradients overflow: it is loaded in bfloat16")
    processor = load_processor(source)
    if script.image_aspect_ratio == "pad":
        processor = with_square_images(processor)
    # TRL would take a Jinja file without our checks
    choice, config.chat_template_path = config.chat_template_path, None
    template = PLAIN if script.prompt_format == PLAIN else training_template(processor, choice)
    if choice is not None and template != PLAIN:
        processor.chat_template = without_marks(template)
    rows = load_rows(script, processor, choice, config.max_length, echo)
    if script.projector is not None:
        read_projector(Path(script.projector))  # before the model, which takes longer

    model = load_for_training(source, script, config)
    if script.projector is not None:
        notes += load_projector(model, Path(script.projector))
    if script.fresh_projector:
        draw_projector(model, config.seed)
    collator = LlavaCollator(processor, template, config.max_length, image_in_every_batch=state.num_processes > 1)
    try:
        trainer = LlavaTrainer(
            model,
            config,
            train_dataset=rows,
            processing_class=processor,
            data_collator=collator,
            peft_config=adapters(model, script, source) if script.use_peft else None,
        )
    except ValueError as error:  # what TRL and PEFT refuse, such as targets that are not there
        raise InputError(f"The training cannot be set up: {first_line(error)} Correct the field.") from error
    trainer.recipe = {name: value for name, value in recipe.items() if value is not None}
    trainer.add_callback(FirstScreen(trainer, echo, dry_run=script.dry_run, notes=notes))
    return source, trainer


def load_for_training(source: Path, script: ScriptArguments, config: LlavaSFTConfig) -> PreTrainedModel:
    """The model, frozen parts in `dtype` and trained ones in float32, as AdamW's small steps need.

    FSDP2 wants one dtype, and casts to bfloat16 itself; DeepSpeed keeps its own float32 copies of bfloat16 weights.
    """
    sharded_fp32 = os.environ.get("ACCELERATE_USE_FSDP") == "true" or bool(config.fsdp)
    deepspeed = config.deepspeed_plugin is not None
    dtype = script.dtype or (stored_dtype(source) if stored_dtype(source) in TRAIN_DTYPES else "bfloat16")
    if sharded_fp32 or not config.bf16:
        dtype = "float32"
    elif deepspeed:
        dtype = "bfloat16"
    device = "cpu" if sharded_fp32 or deepspeed else str(config.device)
    four_bit = four_bit_config() if script.load_in_4bit else False
    model = load_model(source, dtype, device, four_bit=four_bit)
    if script.attn_implementation is not None:
        try:
            model.set_attn_implementation(script.attn_implementation)
        except (ValueError, ImportError) as error:
            raise InputError(
                f"attn_implementation is {script.attn_implementation}, which cannot be used: {first_line(error)} Use "
                "sdpa or eager."
            ) from error
    try:
        with tempfile.TemporaryDirectory() as scratch:
            model.generation_config.save_pretrained(scratch)
    except ValueError as error:
        raise InputError(
            f"generation_config.json of {source} cannot be saved: {first_line(error)} Correct it."
        ) from error
    on_hub = not Path(script.model_name_or_path).exists() and script.model_name_or_path != MICRO
    model.config._name_or_path = script.model_name_or_path  # what the result files name, as it was typed
    model.name_or_path = script.model_name_or_path if on_hub else str(source.absolute())  # what an adapter names
    if not deepspeed:
        trained = ("projector", "norm") if script.use_peft else config.trained_parts
        for name, parameter in model.named_parameters():
            if part_of(name) in trained:
                parameter.data = parameter.data.float()
    return model


@torch.no_grad()
def draw_projector(model: PreTrainedModel, seed: int) -> None:
    """A new projector, as transformers draws one: normal weights, biases 0. A norm after it keeps its start."""
    generator = torch.Generator().manual_seed(seed)
    std = model.config.get_text_config().initializer_range
    for name, parameter in model.model.multi_modal_projector.named_parameters():
        if name.endswith(".bias") and "align_norm" not in name:
            parameter.zero_()
        elif "align_norm" not in name:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def adapters(model: PreTrainedModel, script: ScriptArguments, source: Path) -> LoraConfig:
    """The LoRA configuration, which names the base model and, of a Hub model, its commit."""
    targets = script.lora_target_modules
    if targets is not None and len(targets) == 1 and (targets[0] == "all-linear" or not targets[0].isidentifier()):
        targets = targets[0]  # a pattern
    revision = source.name if re.fullmatch(r"[0-9a-f]{40}", source.name) else None  # a folder of the Hub's cache
    return lora_config(model, script.lora_r, script.lora_alpha, script.lora_dropout, targets, revision=revision)


def _resolve(script: ScriptArguments) -> Path:
    return resolve_model(script.model_name_or_path, script.model_revision)


def _changed(script: ScriptArguments) -> dict[str, Any]:
    return {
        f.name: getattr(script, f.name) for f in dataclasses.fields(script) if getattr(script, f.name) != f.default
    }


def _silent(line: str) -> None:
    pass


def main() -> None:
    """The program."""
    run_program(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
