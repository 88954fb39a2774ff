"""Verdicts of check-data, kept in the user's cache under the hash of all that they depend on."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from llava_norm_align.common.folders import cache_folder
from llava_norm_align.common.results import write_json
from llava_norm_align.data.check_images import ImageFolder
from llava_norm_align.data.check_lengths import TokenCounter

RULES = 1  # goes up when what counts as a fault changes


def verdict_key(
    data_sha256: str,
    listing_sha256: str,
    images: ImageFolder,
    decode: bool,
    stage: int,
    counter: TokenCounter | None,
    max_length: int | None,
) -> str:
    """Hex sha256 of the data file, the listing of its images, and the options that the verdict hangs on."""
    tokens = counter and [counter.fingerprint, max_length]
    content = [RULES, data_sha256, listing_sha256, images.root, images.follow_links, decode, stage, tokens]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def keep_verdict(key: str, report: dict[str, Any]) -> None:
    """Keep `report` under `key`; a cache that cannot be written is left alone."""
    with suppress(OSError):
        write_json(_file(key), report)


def find_verdict(key: str) -> dict[str, Any] | None:
    """The report under `key`, or None."""
    try:
        return json.loads(_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is broken
        return None


def _file(key: str) -> Path:
    return cache_folder() / "checks" / f"{key[:32]}.json"
