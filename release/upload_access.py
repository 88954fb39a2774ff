"""Whether a release may go where it is to go: the Hub is asked before the first byte, and nothing is created."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from llava_norm_align.common.errors import InputError
from llava_norm_align.release.contents import Item
from llava_norm_align.release.upload_errors import (
    TOKENS,
    UNTOUCHED,
    Remote,
    check_version,
    hub_errors,
    patiently,
)
from llava_norm_align.release.upload_tree import check_replaceable, list_files

MAIN = "main"


@dataclass
class Target:
    """Where a release goes."""

    repo_id: str
    """user/name"""
    revision: str | None = None
    """A branch, which is made if it is not there, or refs/pr/N; default: main. With create_pr: what it is against."""
    create_pr: bool = False
    """Open a pull request instead of a commit."""
    public: bool = False
    """Make a new repository public; default: private. One that is there stays as it is."""
    overwrite: bool = False
    """Replace another model, or a README that somebody wrote by hand."""


@dataclass
class Access:
    """What the Hub said about a target. `head` and `files` (by path): what the upload builds on, if it exists."""

    user: str
    exists: bool
    private: bool | None = None
    head: str | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)
    new_branch: bool = False


def open_access(
    target: Target, api: HfApi, items: Sequence[Item], echo: Callable[[str], Any] = lambda text: None
) -> Access:
    """Prove that `items` may go to `target`.

    InputError, before anything is created: names, token and its role, namespace, visibility, revision, another model.
    """
    check_version()
    check_names(target)
    with hub_errors(api, target.repo_id, "asking for access", Remote()):
        user = patiently(api.whoami, echo=echo)
        check_role(user, target)
        try:
            info = patiently(api.model_info, target.repo_id, echo=echo)
        except RepositoryNotFoundError:
            _check_new(target)
            return Access(user["name"], exists=False, new_branch=target.revision not in (None, MAIN))
        patiently(api.auth_check, target.repo_id, write=not target.create_pr, echo=echo)
        _check_visibility(target, info.private)
        head, new_branch = info.sha, False
        if target.revision not in (None, MAIN):
            head, new_branch = _find_revision(target, api, info.sha, echo)
        files = list_files(api, target.repo_id, head)
        if not target.overwrite:
            check_replaceable(api, target.repo_id, head, files, items)
        return Access(user["name"], True, info.private, head, files, new_branch)


def check_names(target: Target) -> None:
    """InputError for a name or a revision that the Hub would not take."""
    try:
        validate_repo_id(target.repo_id)
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{target.repo_id!r} is no name for the Hub: {reason} Name it user/name.") from None
    if target.repo_id.count("/") != 1:
        raise InputError(f"{target.repo_id!r} has no user or organization. Name it user/name.")
    revision = target.revision
    if revision is None:
        return
    if re.fullmatch("[0-9a-f]{7,40}", revision):
        raise InputError(f"--revision {revision} is a commit, which cannot change. Name a branch.")
    wrong = re.search(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|//|@\{|^[-/.]|[/.]$|\.lock$|^$", revision)
    if wrong or (revision.startswith("refs/") and not re.fullmatch(r"refs/pr/\d+", revision)):
        raise InputError(f"--revision {revision!r} is no name of a branch. Name one, or refs/pr/N.")
    if target.create_pr and revision.startswith("refs/pr/"):
        raise InputError(f"--create-pr opens a pull request, and {revision} is one. Leave one of the two out.")


def check_role(user: dict[str, Any], target: Target) -> None:
    """What the account itself says. The rights of a fine-grained token are known only when they are used."""
    role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise InputError(
            f"The token of {user['name']} may only read. Make one that may write ({TOKENS}), and set it with: "
            f"hf auth login --force, or HF_TOKEN. {UNTOUCHED}"
        )
    organizations = [org["name"] for org in user.get("orgs") or [] if org.get("roleInOrg") != "read"]
    names = [user["name"], *organizations]
    owner = target.repo_id.split("/")[0]
    if not target.create_pr and owner.lower() not in [name.lower() for name in names]:
        raise InputError(
            f"{target.repo_id} is not under a name that {user['name']} may write to ({', '.join(names)}). Release "
            f"under one of them, or pass --create-pr to offer the files to {owner}. {UNTOUCHED}"
        )


def _check_new(target: Target) -> None:
    if target.create_pr or (target.revision or "").startswith("refs/"):
        raise InputError(
            f"{target.repo_id} is not on the Hub, or the token may not see it, so there is no pull request to it. "
            f"Leave --create-pr and --revision out to make it, or check the name. {UNTOUCHED}"
        )


def _check_visibility(target: Target, private: bool | None) -> None:
    if target.public and private:
        raise InputError(
            f"{target.repo_id} is there and private, and --public counts for a new repository. Leave it out, and make "
            f"the repository public in its settings on the Hub when you are ready. {UNTOUCHED}"
        )


def _find_revision(target: Target, api: HfApi, main: str, echo: Callable[[str], Any]) -> tuple[str, bool]:
    """The last commit of the revision and whether its branch is to be made (from main)."""
    try:
        head = patiently(api.model_info, target.repo_id, revision=target.revision, echo=echo).sha
    except RevisionNotFoundError:
        if target.create_pr or target.revision.startswith("refs/"):
            raise
        return main, True
    refs = patiently(api.list_repo_refs, target.repo_id, echo=echo)
    if target.revision in [tag.name for tag in refs.tags]:
        raise InputError(
            f"--revision {target.revision} is a tag of {target.repo_id}, which stays. Name a branch. {UNTOUCHED}"
        )
    return head, False
