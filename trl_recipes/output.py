"""The folder that a training writes to: what may be in it before, and the finished model in it."""

import os
import re
import shutil
from pathlib import Path

import torch
from peft import PeftModel

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import check_vision_language
from llava_norm_align.common.results import FOLDER
from llava_norm_align.common.weights import read_weights
from llava_norm_align.conversion.assemble import DTYPE_NAMES
from llava_norm_align.conversion.projector_file import save_projector
from llava_norm_align.trl_recipes import checkpoints
from llava_norm_align.trl_recipes.arguments import TRAIN_DTYPES, ScriptArguments
from llava_norm_align.trl_recipes.monitor import RESULT_FILE
from llava_norm_align.trl_recipes.trainer import LlavaTrainer

OF_TRAINING = re.compile(r"(tmp-)?checkpoint-\d+|tmp-final")
OURS = (
    "model*.safetensors*",
    "projector.safetensors",
    "adapter_*",
    "*config.json",
    "tokenizer*",
    "chat_template.jinja",
)
OURS += ("special_tokens_map.json", "configuration_*norm_align.py", "modeling_*norm_align.py")


def check_output(output: Path, script: ScriptArguments) -> None:
    """InputError unless a training may write to `output`: an empty folder, one to resume, or one to replace."""
    if output.exists() and not output.is_dir():
        raise InputError(f"output_dir {output} is a file. Name a folder.")
    parent = next(folder for folder in (output, *output.parents) if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            f"output_dir {output} cannot be written: {parent} is not yours to write. Name another folder."
        )
    if script.dry_run:
        return
    if script.resume:
        checkpoints.last_checkpoint(output)
    elif output.is_dir() and any(output.iterdir()):
        if not script.overwrite:
            raise InputError(
                f"output_dir {output} is not empty. Go on with the training in it (--resume), replace it "
                "(--overwrite), or name another folder with --output_dir."
            )
        trained = [output / FOLDER / RESULT_FILE, *output.glob(f"*checkpoint-*/{checkpoints.STATE_FILE}")]
        if not any(path.is_file() for path in trained):
            raise InputError(
                f"output_dir {output} holds no training, so --overwrite does not replace it. Name another folder."
            )
        inputs = (script.model_name_or_path, script.projector, script.data_path, script.image_folder)
        for name in (*inputs, script.dataset_name):
            if name is not None and Path(name).exists() and Path(name).resolve().is_relative_to(output):
                raise InputError(
                    f"{name} lies in output_dir {output}, which --overwrite replaces. Name another output_dir."
                )


def remove_training(output: Path) -> None:
    """Remove what a training wrote into `output`, and nothing else."""
    if not output.is_dir():
        return
    for path in output.iterdir():
        if path.is_dir() and (path.name in (FOLDER, "runs", "_push") or OF_TRAINING.fullmatch(path.name)):
            shutil.rmtree(path)
        elif path.is_file() and any(path.match(pattern) for pattern in OURS):
            path.unlink()


def remove_if_empty(output: Path, existed: bool) -> None:
    """The trainer makes its folder before it looks at all fields."""
    if not existed and output.is_dir() and not any(output.iterdir()):
        output.rmdir()


def stored_dtype(source: Path) -> str | None:
    """The dtype that config.json names, or that of the weights."""
    config = check_vision_language(source)
    named = config.get("dtype") or config.get("torch_dtype")
    if named is not None:
        return named
    stored = {tensor.dtype for name, tensor in read_weights(source).tensors.items() if ".align_norm." not in name}
    return DTYPE_NAMES.get(next(iter(stored))) if len(stored) == 1 else "float32"


def finish(trainer: LlavaTrainer, source: Path) -> None:
    """Write the finished model into output_dir: a folder that loads alone, or an adapter; and push it if asked.

    Its dtype is the one it was published in (bfloat16 for float16). Where only the projector and its norm were
    trained, they are also written as projector.safetensors.
    """
    folder = Path(trainer.args.output_dir)
    writing = folder / "tmp-final"
    trainer.final_dtype = TRAIN_DTYPES.get(stored_dtype(source), torch.bfloat16)
    if trainer.is_world_process_zero():
        shutil.rmtree(writing, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    with checkpoints.disk_errors(writing):
        trainer.save_model(str(writing), _internal_call=True)
        if trainer.is_world_process_zero():
            calibration = source / FOLDER / "calibration.json"
            if calibration.is_file():
                (writing / FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(calibration, writing / FOLDER / calibration.name)
            whole = not isinstance(trainer.model, PeftModel)
            sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if whole and not sharded and set(trainer.args.trained_parts) <= {"projector", "norm"}:
                save_projector(trainer.model, writing / checkpoints.PROJECTOR_FILE, dtype=trainer.final_dtype)
    if trainer.is_world_process_zero():
        for path in [path for path in sorted(writing.rglob("*")) if path.is_file()]:
            target = folder / path.relative_to(writing)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)
        shutil.rmtree(writing)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
