"""The target norm T of a conversion: given, measured on the text table, or the model's own visual norm."""

import math
from typing import Any

import transformers

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.calibration import check_gain, measure_table
from llava_norm_align.conversion.embedding_scale import measure_embedding_scale
from llava_norm_align.conversion.source import Source
from llava_norm_align.conversion.verify import quiet_transformers


def calibrate(
    stock: Source, target_norm: float | None, start: str = "text", own_rows: int | None = None
) -> dict[str, Any]:
    """The text table's norms, and T with where it came from; with start "visual", T is None until it is measured.

    Rows of the table from `own_rows` on were added to the source and are left out.
    InputError for a language model that scales its embeddings, where the table's norm is no target, unless T is given.
    """
    text_config = stock.config.text_config
    table = measure_table(stock.table, text_config.vocab_size, text_config.hidden_size, own_rows=own_rows)
    with quiet_transformers():
        scale = measure_embedding_scale(text_config)
    calibration = {
        "target_norm": None,
        "target_from": "visual",
        "table": table,
        "embedding_scale": None if scale is None else {"text": scale.text, "image": scale.image},
    }
    if start == "visual":
        return calibration
    if target_norm is None and table["mean"] is None:
        raise InputError(
            f"The text embedding table {stock.table.name} in {stock.table.file} is all zero (no row has a norm above "
            f"{table['eps']}), so it gives no target norm. Pass --target."
        )
    if target_norm is None and (scale is None or not scale.is_one):
        version = f"transformers {transformers.__version__}"
        if scale is None:
            found = f"the input of its first decoder layer is no multiple of the embedding in {version}"
            advice = "measure the norm of text tokens at that layer and pass it as --target."
        else:
            found = (
                f"in {version} a text token reaches the first decoder layer with {scale.text:.4g} times the norm of "
                f"its row in the table, and a visual token with {scale.image:.4g} times that of the projector's output"
            )
            advice = f"to match the two there, pass --target {table['mean'] * scale.text / scale.image:.6g}."
        raise InputError(
            f"The language model of {stock.folder} ({text_config.model_type}) changes embeddings after the table: "
            f"{found}. The table's mean norm, {table['mean']:.6g}, is therefore not a target on its own; {advice}"
        )
    target = float(target_norm) if target_norm is not None else table["mean"]
    check_gain(target, text_config.hidden_size)
    return calibration | {"target_norm": target, "target_from": "table" if target_norm is None else "given"}


def scale_factor(target_norm: float, projector_norm: float) -> float:
    """The factor of norm type "scale". InputError if the projector's output has no norm."""
    scale = target_norm / projector_norm if projector_norm else math.inf
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(
            f"The projector's output has the mean norm {projector_norm:g}, which no factor brings to {target_norm:g}. "
            "Use a trained checkpoint, or another --norm."
        )
    return scale
