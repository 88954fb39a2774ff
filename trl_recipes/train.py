"""Where a training is started from: TRL is imported here, or what is missing is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import missing_extra


def import_training() -> Callable[..., Path | None]:
    """`sft.run`. InputError, which names the extra, if what it needs is not installed."""
    try:
        from llava_norm_align.trl_recipes.sft import run
    except ImportError as error:
        if error.name not in ("trl", "datasets", "peft"):
            raise
        raise missing_extra(error.name, "train", "Training, which takes transformers 5,") from None
    return run


def train(*arguments: Any, echo: Callable[[str], None] = print) -> Path | None:
    """Train by a recipe, as `train RECIPE.yaml [--field value ...]`; returns the folder of the finished model."""
    return import_training()([str(argument) for argument in arguments], echo)
