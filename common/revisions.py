"""A model with its revision in one word: ID@REVISION."""

import os

from llava_norm_align.common.errors import InputError


def split_revision(model: str) -> tuple[str, str | None]:
    """ID@REVISION as (ID, REVISION); a folder is taken as it is. InputError where one of the two is empty."""
    if "@" not in model or os.path.isdir(model):
        return model, None
    name, _, revision = model.rpartition("@")
    if not name or not revision:
        raise InputError(f"{model} names no model or no revision. Write ID@REVISION, or the ID alone.")
    return name, revision
