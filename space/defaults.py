"""The models of a page that names none: micro-LLaVA, and its norm-aligned form."""

import fcntl
from collections.abc import Callable
from pathlib import Path

from llava_norm_align.common.folders import cache_folder
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.micro import cached_micro

TRAINED = Path("out/release/micro-llava-norm-align")  # what `make release-folder` builds


def default_models(wheels: Path | None, echo: Callable[[str], None]) -> tuple[Path, Path]:
    """The folders of micro-LLaVA and of its norm-aligned form, built on the first call.

    The latter is the trained one of `make release-folder` where it lies in the working folder; else the conversion
    alone, which no training has followed. `echo` gets a line for each step that takes time.
    """
    echo("[1/2] micro-LLaVA (built on the first start, which takes about a minute)")
    stock = cached_micro(wheels)
    if (TRAINED / "config.json").is_file():
        echo(f"[2/2] its norm-aligned form, trained: {TRAINED}")
        return stock, TRAINED
    echo("[2/2] its norm-aligned form, converted and not trained (`make release-folder` builds a trained one)")
    return stock, cached_aligned(stock)


def cached_aligned(stock: Path) -> Path:
    """The conversion of micro-LLaVA beside it in the cache; a second process waits for the first."""
    folder = stock.with_name(stock.name.replace("micro-llava", "micro-llava-norm-align"))
    with (cache_folder() / "micro-llava-norm-align.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            convert(str(stock), folder, report=False, overwrite=True)
    return folder
