"""Tiny LLaVAs in training: rows in TRL's format, trainers on the CPU, and weights under the names in a file."""

from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration
from llava_norm_align.trl_recipes.config import LlavaSFTConfig
from llava_norm_align.trl_recipes.trainer import LlavaTrainer
from tests.helpers import tiny
from tests.helpers.convert import stored_name

ANSWERS = ["cat", "red dog", "dog", "a red cat"]


def row(number, answer=None, image=True):
    return {
        "prompt": [{"role": "user", "content": "what is in the picture ?"}],
        "completion": [{"role": "assistant", "content": answer or ANSWERS[number % 4]}],
        "images": [tiny.photo(number)] if image else [],
    }


def rows(count=6):
    return Dataset.from_list([row(number) for number in range(count)])


def norm_aligned(dropout=0.0, **fields):
    torch.manual_seed(0)
    config = tiny.llava_config(LlavaNormAlignConfig, **{"norm_align_target": 1.0, **fields})
    config.text_config.attention_dropout = dropout
    return tiny.randomize(LlavaNormAlignForConditionalGeneration(config))


def arguments(folder, config=LlavaSFTConfig, **fields):
    defaults = dict(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=2, max_steps=2, save_steps=100, learning_rate=1e-2,
        activation_checkpointing=False,
    )  # fmt: skip
    return config(**{**defaults, **fields})


def trainer(model, folder, callbacks=(), data=None, cls=LlavaTrainer, config=LlavaSFTConfig, **fields):
    peft_config = fields.pop("peft_config", None)
    eval_dataset = fields.pop("eval_dataset", None)
    return cls(
        model=model,
        args=arguments(folder, config, **fields),
        train_dataset=rows() if data is None else data,
        eval_dataset=eval_dataset,
        processing_class=tiny.processor(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def stored(folder):
    """The tensors in a checkpoint, under names that do not depend on the line that wrote it."""
    tensors = load_file(Path(folder, "model.safetensors"))
    return {stored_name(name, "old"): tensor for name, tensor in tensors.items()}


def live(model):
    """The tensors of a model, under the names of `stored`."""
    return {stored_name(name, "old"): tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    """Whether two dicts have the same tensors, bitwise."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )
