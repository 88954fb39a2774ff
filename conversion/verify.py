"""Checks of a converted folder that load no weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report and no progress bar from transformers: what they say is checked and raised here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def check_keys(folder: Path, model_class: type[PreTrainedModel], config: PretrainedConfig | None = None) -> int:
    """Load `folder` as a `model_class` without memory (meta device); returns its number of tensors.

    `config` takes the place of the folder's config.json. transformers itself renames and compares the checkpoint's
    keys and shapes. RuntimeError, from the model's guard, if one is missing, left over or of another shape.
    """
    with quiet_transformers():
        model = model_class.from_pretrained(folder, config=config, device_map="meta", dtype="auto")
    return len(model.state_dict())
