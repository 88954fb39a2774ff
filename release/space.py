"""A Space on the Hub that shows a released model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.results import provenance
from llava_norm_align.release.card_license import is_hub_id
from llava_norm_align.release.space_folder import MARK, write_space
from llava_norm_align.release.upload_access import Target, check_names, check_role
from llava_norm_align.release.upload_errors import UNTOUCHED, Remote, check_version, hub_errors, patiently, status_of

MESSAGE = "A page that shows a norm-aligned LLaVA"
TYPE = "space"


def release_space(
    target: Target,
    model: str,
    *,
    base: str | None = None,
    license: str | None = None,
    check: bool = False,
    out: Path | None = None,
    api: HfApi | None = None,
    echo: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Put up a Space that shows the Hub's `model`, and `base` beside it (ID or ID@REVISION); a summary for JSON.

    The page's folder is one commit: the page, its requirements, this package's source. `check`: it is made and
    listed, and nothing is uploaded. `out`: a new folder that it is written to, too. A new Space is private unless
    target.public.
    InputError for a bad name, a model that the Hub does not have, a Space of another kind without target.overwrite,
    and what the Hub refuses: its words say whether a plan is needed (402) or a right is missing (403).
    """
    check_version()
    check_names(target)
    for name in filter(None, (model, base)):
        if not is_hub_id(name.partition("@")[0]):
            raise InputError(
                f"{name!r} is no model on the Hub. Name it user/name or user/name@COMMIT; release it first."
            )
    if out is not None and out.exists():
        raise InputError(f"{out} is there already. Name a new folder.")
    api = api or HfApi()
    remote = Remote()
    with tempfile.TemporaryDirectory(prefix="space-") as scratch:
        folder = out or Path(scratch, "space")
        write_space(folder, target.repo_id, model, base, license)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        result = {**provenance(), "space": target.repo_id, "model": model, "base": base, "files": files}
        echo(f"{len(files)} files: app.py, README.md, requirements.txt and the source in llava_norm_align/")
        if check:
            return result
        with hub_errors(api, target.repo_id, "putting up the Space", remote):
            user = patiently(api.whoami, echo=echo)
            check_role(user, target)
            _check_models(api, [model, *([base] if base else [])], echo)
            exists = _check_space(api, target, echo)
            if not exists:
                _create(api, target, remote, echo)
                remote.words = (
                    f"The new Space {target.repo_id} is there, without the page; run the same command again."
                )
            info = api.upload_folder(
                repo_id=target.repo_id,
                repo_type=TYPE,
                folder_path=folder,
                commit_message=MESSAGE,
                delete_patterns=["llava_norm_align/**"],
            )
            remote.words = "The upload is there, and was not checked."
            _check_arrived(api, target, files, info.oid, echo)
    url = f"{api.endpoint}/spaces/{target.repo_id}"
    echo(f"{url}: commit {info.oid}. It starts there by itself; its first start downloads the models.")
    return result | {"commit": info.oid, "url": url}


def _check_models(api: HfApi, models: list[str], echo: Callable[[str], Any]) -> None:
    for name in models:
        repo_id, _, revision = name.partition("@")
        try:
            info = patiently(api.model_info, repo_id, revision=revision or None, echo=echo)
        except RepositoryNotFoundError:
            raise InputError(
                f"The Hub has no model {name}, or the token may not see it. Release it first. {UNTOUCHED}"
            ) from None
        if info.private:
            echo(f"Note: {repo_id} is private: the Space needs a token of its own (secret HF_TOKEN) to read it")


def _check_space(api: HfApi, target: Target, echo: Callable[[str], Any]) -> bool:
    """Whether the Space is there. InputError if it is somebody's other page."""
    try:
        patiently(api.space_info, target.repo_id, echo=echo)
    except RepositoryNotFoundError:
        return False
    patiently(api.auth_check, target.repo_id, repo_type=TYPE, write=True, echo=echo)
    with tempfile.TemporaryDirectory() as folder:
        try:
            readme = Path(
                api.hf_hub_download(target.repo_id, "README.md", repo_type=TYPE, local_dir=folder)
            ).read_text()
        except EntryNotFoundError:
            readme = ""
    if MARK not in readme and not target.overwrite:
        files = set(patiently(api.list_repo_files, target.repo_id, repo_type=TYPE, echo=echo))
        if files - {".gitattributes", "README.md"}:
            raise InputError(
                f"The Space {target.repo_id} holds another page. Name another Space, or pass --overwrite to replace "
                f"its app.py, README.md and requirements.txt (its history stays). {UNTOUCHED}"
            )
    return True


def _create(api: HfApi, target: Target, remote: Remote, echo: Callable[[str], Any]) -> None:
    visibility = "public" if target.public else "private"
    options = {"repo_type": TYPE, "space_sdk": "gradio", "private": not target.public}
    remote.words = f"Whether the Space was created is not known: look at {api.endpoint}/spaces/{target.repo_id}."
    try:
        patiently(api.create_repo, target.repo_id, echo=echo, **options)
    except HfHubHTTPError as error:
        if status_of(error) in (402, 403):
            remote.words = UNTOUCHED
        raise
    echo(f"Created the Space {target.repo_id} ({visibility})")


def _check_arrived(api: HfApi, target: Target, files: list[str], commit: str, echo: Callable[[str], Any]) -> None:
    there = set(patiently(api.list_repo_files, target.repo_id, repo_type=TYPE, revision=commit, echo=echo))
    missing = sorted(set(files) - there)
    if missing:
        raise CheckFailed(f"{target.repo_id} lacks {missing[0]} at {commit[:12]}. Run the same command again.")
