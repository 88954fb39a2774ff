"""A Space on the Hub that shows a released model."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, SpaceInfo
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile, RepoFolder

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.results import provenance
from llava_norm_align.release.card_license import LICENSES
from llava_norm_align.release.contents import Item
from llava_norm_align.release.space_folder import LICENSE, MARK, PACKAGE, write_space
from llava_norm_align.release.space_models import check_model_names, check_models
from llava_norm_align.release.upload import visibility
from llava_norm_align.release.upload_access import Target, check_names, check_role
from llava_norm_align.release.upload_errors import UNTOUCHED, Remote, check_version, hub_errors, patiently, status_of
from llava_norm_align.release.upload_tree import split

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

    The page's folder is one commit: the page, its requirements, this package's source. Nothing is committed where
    nothing changed. `license`: of the page, an identifier of the Hub's; default: that of the source. `check`: the
    models are looked at and the folder is made and listed, and nothing is uploaded. `out`: a new folder that it is
    written to, too. A new Space is private unless target.public, and one that is there stays as it is.
    InputError for a bad name, models that the Hub does not have or that the page cannot show, a Space of another kind
    without target.overwrite, and what the Hub refuses: its words say whether a plan is needed (402) or a right is
    missing (403).
    """
    check_version()
    check_names(target)
    check_model_names(model, base)
    license = check_license(LICENSE if license is None else license)
    if out is not None and out.exists():
        raise InputError(f"{out} is there already. Name a new folder.")
    api = api or HfApi()
    there = None
    with hub_errors(api, target.repo_id, "asking for access", Remote()):
        if not check:
            check_role(patiently(api.whoami, echo=echo), target)
        check_models(api, model, base, echo)
        if not check:
            there = _find_space(api, target, echo)
    with tempfile.TemporaryDirectory(prefix="space-") as scratch:
        folder = out or Path(scratch, "space")
        write_space(folder, target.repo_id, model, base, license)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        items = [Item(path.relative_to(folder).as_posix(), path, path.stat().st_size) for path in paths]
        files = [item.name for item in items]
        result = {**provenance(), "space": target.repo_id, "model": model, "base": base, "files": files}
        echo(f"{len(files)} files: app.py, README.md, requirements.txt and the source in {PACKAGE}/")
        if check:
            return result
        return result | _upload(api, target, there, folder, items, echo)


def _upload(
    api: HfApi,
    target: Target,
    there: SpaceInfo | None,
    folder: Path,
    items: Sequence[Item],
    echo: Callable[[str], Any],
) -> dict[str, Any]:
    """Make the Space hold the `folder`; its commit and its address."""
    url, remote = f"{api.endpoint}/spaces/{target.repo_id}", Remote()
    with hub_errors(api, target.repo_id, "putting up the Space", remote):
        if there is not None and not _differs(api, target, there.sha, items, echo):
            echo(f"{url} has all {len(items)} files: nothing to upload, so there is no new commit after {there.sha}")
            return {"commit": there.sha, "url": url}
        if there is None:
            _create(api, target, remote, echo)
            remote.words = f"The new Space {target.repo_id} is there, without the page; run the same command again."
        info = api.upload_folder(
            repo_id=target.repo_id,
            repo_type=TYPE,
            folder_path=folder,
            commit_message=MESSAGE,
            delete_patterns=[f"{PACKAGE}/**"],
        )
        remote.words = "The upload is there, and was not checked."
        _check_arrived(api, target, items, info.oid, echo)
    echo(f"{url}: commit {info.oid}. It starts there by itself; its first start downloads the models.")
    return {"commit": info.oid, "url": url}


def check_license(given: str) -> str:
    """The Hub's identifier that is `given`. InputError for anything else: a Space has no place for another text."""
    name = given.strip().lower()
    if name not in LICENSES - {"other"}:
        raise InputError(
            f"--license is {given!r}, which is none of the Hub's identifiers. Pass one of "
            f"https://huggingface.co/docs/hub/repositories-licenses, or leave it out for the source's, {LICENSE}."
        )
    return name


def _find_space(api: HfApi, target: Target, echo: Callable[[str], Any]) -> SpaceInfo | None:
    """The Space, if it is there. InputError if it is somebody's other page, or private and to be public."""
    try:
        info = patiently(api.space_info, target.repo_id, echo=echo)
    except RepositoryNotFoundError:
        return None
    patiently(api.auth_check, target.repo_id, repo_type=TYPE, write=True, echo=echo)
    if target.public and info.private:
        raise InputError(
            f"The Space {target.repo_id} is there and private, and --public counts for a new one. Leave it out, and "
            f"make the Space public in its settings on the Hub when you are ready. {UNTOUCHED}"
        )
    echo(f"The Space {target.repo_id} is there, {visibility(info.private)}, and stays so")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = patiently(
                api.hf_hub_download, target.repo_id, "README.md", echo=echo, repo_type=TYPE, local_dir=folder
            )
            readme = Path(path).read_text(errors="replace")
        except EntryNotFoundError:
            readme = ""
    if MARK not in readme and not target.overwrite:
        files = set(patiently(api.list_repo_files, target.repo_id, repo_type=TYPE, echo=echo))
        if files - {".gitattributes", "README.md"}:
            raise InputError(
                f"The Space {target.repo_id} holds another page. Name another Space, or pass --overwrite to replace "
                f"its app.py, README.md and requirements.txt (its history stays). {UNTOUCHED}"
            )
    return info


def _list(api: HfApi, target: Target, commit: str, echo: Callable[[str], Any]) -> dict[str, RepoFile]:
    def entries() -> list[RepoFile | RepoFolder]:  # anew at each try
        return list(api.list_repo_tree(target.repo_id, repo_type=TYPE, recursive=True, revision=commit))

    return {entry.path: entry for entry in patiently(entries, echo=echo) if isinstance(entry, RepoFile)}


def _differs(api: HfApi, target: Target, commit: str, items: Sequence[Item], echo: Callable[[str], Any]) -> bool:
    """Whether a file is missing there, has another content, or is left over in the source."""
    files = _list(api, target, commit, echo)
    source = {path for path in files if path.startswith(f"{PACKAGE}/")}
    return bool(split(items, files)[0] or source - {item.name for item in items})


def _create(api: HfApi, target: Target, remote: Remote, echo: Callable[[str], Any]) -> None:
    options = {"repo_type": TYPE, "space_sdk": "gradio", "private": not target.public}
    remote.words = f"Whether the Space was created is not known: look at {api.endpoint}/spaces/{target.repo_id}."
    try:
        patiently(api.create_repo, target.repo_id, echo=echo, **options)
    except HfHubHTTPError as error:
        if status_of(error) in (402, 403):
            remote.words = UNTOUCHED
        raise
    echo(f"Created the Space {target.repo_id} ({visibility(not target.public)})")


def _check_arrived(api: HfApi, target: Target, items: Sequence[Item], commit: str, echo: Callable[[str], Any]) -> None:
    missing, _ = split(items, _list(api, target, commit, echo))
    if missing:
        raise CheckFailed(
            f"{target.repo_id} lacks {missing[0].name}, or has another one, at {commit[:12]}. Run the same command "
            "again."
        )
