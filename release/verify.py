"""What a release left on the Hub, checked from there: every file's hash, and that others can load it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from llava_norm_align.common.errors import CheckFailed
from llava_norm_align.common.fresh_process import ProcessFailed, run_script
from llava_norm_align.release.contents import Item
from llava_norm_align.release.upload import Pushed
from llava_norm_align.release.upload_errors import Remote, clean, hub_errors
from llava_norm_align.release.upload_tree import list_files, local_hash, remote_hash

SCRIPT = Path(__file__).with_name("verify_alone.py")
CACHES = ["HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE"]
# other names of a cache, and what would keep the fresh process from the Hub
NOT_PASSED_ON = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE") + (
    "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip


def check_remote(api: HfApi, pushed: Pushed, items: Sequence[Item]) -> None:
    """CheckFailed unless the commit holds each item with its size and hash, and nothing that was to be deleted.

    The hashes (sha256 of a large file, git's blob id of any other) are those that the Hub lists, against the files
    as they are here now.
    """
    remote = Remote("The upload is there, and was not checked.")
    with hub_errors(api, pushed.repo_id, "the check of what was uploaded", remote):
        files = list_files(api, pushed.repo_id, pushed.commit)
        wrong = [said for item in items if (said := _difference(item, files))]
        wrong += [f"{path} is still there" for path in pushed.deleted if path in files]
    if wrong:
        raise CheckFailed(
            f"{pushed.repo_id} at {pushed.commit[:12]} is not what was uploaded: {'; '.join(wrong)}. If the folder "
            "did not change meanwhile, run the same command again, which uploads what differs."
        )


def _difference(item: Item, files: dict[str, Any]) -> str | None:
    file = files.get(item.name)
    if file is None:
        return f"{item.name} is missing"
    size, here = item.path.stat().st_size, local_hash(item.path, bool(file.lfs))
    if file.size != size:
        return f"{item.name} has {file.size:,} bytes there and {size:,} here"
    there = remote_hash(file)
    if there != here:
        return f"{item.name} has the hash {there[:12]} there and {here[:12]} here"
    return None


def check_loading(api: HfApi, repo_id: str, commit: str, *, python: Path, weights: bool) -> dict[str, Any]:
    """Load config, processor and code of a commit in a fresh process of `python`, as somebody without this package.

    With `weights` the model is loaded, too, and answers once. All comes from the Hub: the caches are empty. The result
    has python, transformers, config, processor (None where there is none), classes, note, and answer with `weights`.
    CheckFailed if it does not load.
    """
    what = "weights" if weights else "files"
    try:
        return run_script(python, SCRIPT, repo_id, commit, what, env=_environment(api), caches=CACHES)
    except ProcessFailed as error:
        code, last = error.args
        raise CheckFailed(
            f"{repo_id} at {commit[:12]} is on the Hub, but does not load in {python} ({code}): {clean(last, api)}. "
            "Ask doctor about the folder, and release it again."
        ) from None


def _environment(api: HfApi) -> dict[str, str]:
    """This process's, without other names of its caches; the token stays where it is stored."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for name in NOT_PASSED_ON:
        kept.pop(name, None)
    if isinstance(api.token, str):
        kept["HF_TOKEN"] = api.token
    return kept | {"HF_ENDPOINT": api.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
