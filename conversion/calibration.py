"""The target norm T: the mean L2 norm of a model's text embeddings (arXiv 2512.08374, section 4)."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.weights import StoredTensor
from llava_norm_align.diagnosis.measure import UNUSED

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHUNK = 4 * 2**20  # bytes of the table read at a time
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def check_target_norm(target_norm: float | None) -> None:
    """Raise InputError unless `target_norm` is None or an L2 norm that a token can have."""
    valid = isinstance(target_norm, (int, float)) and not isinstance(target_norm, bool)
    if target_norm is not None and not (valid and math.isfinite(target_norm) and target_norm > 0):
        raise InputError(
            f"--target is {target_norm}; an L2 norm was expected: a positive, finite number, such as the 1.09 of "
            "Llama-3.2-3B. Leave it out to measure the text embeddings."
        )


def check_gain(target_norm: float, hidden_size: int) -> None:
    """Raise InputError unless the gain T / sqrt(D) is a normal number in float32, in which it is stored."""
    gain, limits = target_norm / math.sqrt(hidden_size), torch.finfo(torch.float32)
    if not limits.tiny <= gain <= limits.max:
        raise InputError(
            f"The target norm {target_norm:g} makes a gain of {gain:g} on each of {hidden_size} channels, but float32 "
            f"holds {limits.tiny:g} to {limits.max:g}. Pass the norm of text tokens as --target, often near 1."
        )


def measure_table(
    table: StoredTensor, vocab_size: int, hidden_size: int, eps: float = UNUSED, own_rows: int | None = None
) -> dict[str, Any]:
    """Norm statistics of the rows of a text embedding table [vocab_size, hidden_size], and the table's sha256.

    `mean` is T. Rows with ||w||_2 <= eps are left out, and those from `own_rows` on, which we added; if that leaves
    none, the statistics are None. The table is read in chunks of rows; sums are float64. InputError for a table that
    has another shape, is quantised, or has NaN or inf.
    """
    where = f"The text embedding table {table.name} in {table.file}"
    if table.shape != (vocab_size, hidden_size):
        raise InputError(
            f"{where} has shape {list(table.shape)}, but config.json says vocab_size {vocab_size} and hidden_size "
            f"{hidden_size}. Use a checkpoint whose config.json belongs to its weights."
        )
    if table.dtype not in FLOAT_DTYPES:
        raise InputError(f"{where} is stored as {table.dtype}: quantised. Convert the unquantised checkpoint instead.")
    norms, digest = _row_norms(table)
    if not torch.isfinite(norms).all():
        bad = int((~torch.isfinite(norms)).sum())
        raise InputError(
            f"{where} has NaN or inf in {bad} of {len(norms)} rows. Download or train the checkpoint again."
        )
    used = norms[:own_rows][norms[:own_rows] > eps]
    measured = len(used) > 0
    return {
        "tensor": table.name,
        "dtype": table.dtype,
        "rows": len(norms),
        "rows_used": len(used),
        "rows_left_out": len(norms) - len(used),
        "eps": eps,
        "mean": used.mean().item() if measured else None,
        "std": used.std(correction=0).item() if measured else None,
        "median": used.quantile(0.5).item() if measured else None,
        "quantiles": {str(q): used.quantile(q).item() if measured else None for q in QUANTILES},
        "sha256": digest,
    }


def _row_norms(table: StoredTensor) -> tuple[torch.Tensor, str]:
    """L2 norm of every row in float64 [rows], and the sha256 of the table's bytes."""
    rows, width = table.shape
    row_bytes = table.nbytes // max(rows, 1)
    step = max(1, CHUNK // max(row_bytes, 1))
    norms, digest, hashing = torch.zeros(rows, dtype=torch.float64), hashlib.sha256(), None
    with table.file.open("rb") as file, ThreadPoolExecutor(1) as pool:  # the hash takes as long as the norms
        file.seek(table.offset)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            block = bytearray(file.read(count * row_bytes))
            if hashing:
                hashing.result()
            hashing = pool.submit(digest.update, block)
            chunk = torch.frombuffer(block, dtype=FLOAT_DTYPES[table.dtype]).view(count, width)
            norms[start : start + count] = torch.linalg.vector_norm(chunk.double(), dim=1)
    return norms, digest.hexdigest()
