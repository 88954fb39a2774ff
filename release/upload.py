"""The upload of a release: one commit or one pull request, resumable, and nothing where nothing changed."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, Discussion, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

from llava_norm_align.common.errors import InputError
from llava_norm_align.release.contents import Item
from llava_norm_align.release.upload_access import MAIN, Access, Target, open_access
from llava_norm_align.release.upload_errors import (
    UNTOUCHED,
    WAITS,
    Remote,
    hub_errors,
    is_transient,
    patiently,
    pause,
    status_of,
)
from llava_norm_align.release.upload_tree import left_over, list_files, split

__all__ = ["Access", "Pushed", "Target", "open_access", "upload"]

# In place of a .gitignore on the Hub, which would silently leave files of the release out.
NOTHING_IGNORED = "# nothing\n"
AGAIN = "files that went up whole are not sent again by the same command."


@dataclass
class Pushed:
    """What an upload left on the Hub. Without changes `commit` is the one that was there, `uploaded` is empty."""

    repo_id: str
    commit: str
    revision: str
    url: str
    pull_request: str | None = None
    """Its address."""
    uploaded: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    """What an earlier release left there and this one does not have."""
    kept: list[str] = field(default_factory=list)
    """Files there that no release writes."""
    created: bool = False
    private: bool | None = None
    """Whether only those with a right see the repository."""


def upload(
    api: HfApi, target: Target, access: Access, items: Sequence[Item], message: str, echo: Callable[[str], Any]
) -> Pushed:
    """Make the Hub hold `items` at `target`, in one commit on top of what `access` saw.

    A new repository is private unless target.public. What the Hub has is not sent again, nor are whole files of a
    broken upload. Weights, configs, code and results of an earlier release that are no longer among the items are
    named and deleted in the same commit; every other file stays, licences among them. Errors: InputError, which says
    what the Hub holds now.
    """
    remote = Remote()
    with hub_errors(api, target.repo_id, f"the upload to {target.repo_id}", remote):
        return _Upload(api, target, access, items, message, echo, remote).run()


@dataclass
class _Upload:
    api: HfApi
    target: Target
    access: Access
    items: Sequence[Item]
    message: str
    echo: Callable[[str], Any]
    remote: Remote

    def run(self) -> Pushed:
        repo_id, items, was_there = self.target.repo_id, self.items, self.access.exists
        if not was_there or self.access.new_branch:
            self._make_place()
        pushed = replace(self._compare(), created=not was_there)
        if not pushed.uploaded and not pushed.deleted:
            self.echo(f"{repo_id} has all {len(items)} files: nothing to upload, so there is no new commit")
            return pushed
        if self.target.create_pr and (found := self._find_pull_request(pushed)):
            self.echo(f"{found.pull_request} has all {len(items)} files: nothing to upload")
            return replace(found, uploaded=[], deleted=[], unchanged=[item.name for item in items])
        changed = [item for item in items if item.name in pushed.uploaded]
        size, place = sum(item.size for item in changed), f"the {visibility(pushed.private)} repository {repo_id}"
        self.echo(f"Uploading {len(changed)} of {len(items)} files, {size:,} bytes, to {place}")
        if pushed.deleted:
            self.echo(f"Deleting there what this release no longer has: {', '.join(pushed.deleted)}")
        additions = [CommitOperationAdd(item.name, item.path) for item in changed]
        self._send_large(additions)
        deletions = [CommitOperationDelete(path, is_folder=False) for path in pushed.deleted]
        return self._commit([*additions, *deletions], pushed)

    def _compare(self) -> Pushed:
        """What is to be done, as it will be said afterwards."""
        files, target = self.access.files, self.target
        changed, unchanged = split(self.items, files)
        deleted = left_over(self.items, files)
        ours = {item.name for item in self.items} | set(deleted) | {".gitattributes"}
        branch = "" if target.revision in (None, MAIN) else f"/tree/{target.revision}"
        return Pushed(
            repo_id=target.repo_id,
            commit=self.access.head or "",
            revision=target.revision or MAIN,
            url=f"{self.api.endpoint}/{target.repo_id}{branch}",
            uploaded=[item.name for item in changed],
            unchanged=[item.name for item in unchanged],
            deleted=deleted,
            kept=sorted(set(files) - ours),
            private=self.access.private,
        )

    def _make_place(self) -> None:
        """The repository and the branch that are not there yet."""
        repo_id, branch = self.target.repo_id, self.target.revision
        if not self.access.exists:
            seen = visibility(not self.target.public)
            self._create(f"the new repository {repo_id} ({seen})")
            self.echo(f"Created {repo_id} ({seen})")
            self.remote.words = f"The new repository {repo_id} ({seen}) is there, without the model; {AGAIN}"
        if self.access.new_branch:
            name, before = f"new branch {branch} of {repo_id}", self.remote.words
            self._make(f"the {name}", self.api.create_branch, repo_id, branch=branch, exist_ok=True)
            there = f"The {name} is there, with the files of main; {AGAIN}"
            self.remote.words = there if self.access.exists else before
            self.echo(f"Created the branch {branch} of {repo_id}")
        info = patiently(self.api.model_info, repo_id, revision=branch, echo=self.echo)
        self.access = Access(self.access.user, True, info.private, info.sha, list_files(self.api, repo_id, info.sha))

    def _make(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Create `what`. Unless the Hub refuses the first try, it may be there: a lost answer may have been a yes."""
        before, tries = self.remote.words, []
        unknown = f"Whether {what} was created is not known: look at {self.api.endpoint}/{self.target.repo_id}."
        self.remote.words = unknown if before == UNTOUCHED else f"{before} {unknown}"

        def once() -> None:
            tries.append(1)
            call(*arguments, **options)

        try:
            patiently(once, echo=self.echo)
        except HTTPError as error:
            if len(tries) == 1 and not is_transient(error):
                self.remote.words = before
            raise

    def _create(self, what: str) -> None:
        """A repository that appeared since it was looked for may be ours: the answer to an earlier try was lost."""
        repo_id = self.target.repo_id
        try:
            self._make(what, self.api.create_repo, repo_id, private=not self.target.public)
        except HfHubHTTPError as error:
            if status_of(error) != 409:
                raise
            try:
                info = patiently(self.api.model_info, repo_id, echo=self.echo)
                if set(list_files(self.api, repo_id, info.sha)) <= {".gitattributes"}:
                    return
            except RepositoryNotFoundError:
                pass
            raise InputError(
                f"{repo_id} is on the Hub (409), but was not to be seen a moment ago. Look at it, or use a token that "
                "may read it, and run again. Nothing of this release is there."
            ) from None

    def _send_large(self, additions: list[CommitOperationAdd]) -> None:
        """Upload what git does not hold itself; the Hub keeps each file that is whole."""
        if self.remote.words == UNTOUCHED:
            self.remote.words = f"{self.target.repo_id} is as it was; {AGAIN}"
        for part in _parts(additions):
            self.api.preupload_lfs_files(
                self.target.repo_id,
                part,
                revision=self.target.revision,
                create_pr=self.target.create_pr,
                free_memory=False,
                gitignore_content=NOTHING_IGNORED,
            )

    def _commit(self, operations: list[CommitOperationAdd | CommitOperationDelete], pushed: Pushed) -> Pushed:
        """A commit whose answer is lost has mostly landed, so the Hub is asked before another try."""
        before, target = self.remote.words, self.target
        what, where = "commit", pushed.url
        if target.create_pr:
            what, where = "pull request", f"{self.api.endpoint}/{target.repo_id}/discussions"
        for wait in (*WAITS, None):
            self.remote.words = f"Whether the {what} is there is not known: look at {where}, or run again."
            try:
                info = self.api.create_commit(
                    target.repo_id,
                    operations,
                    commit_message=self.message,
                    revision=target.revision,
                    create_pr=target.create_pr,
                    parent_commit=self.access.head,
                )
            except (HTTPError, ValueError) as error:
                if is_transient(error) or status_of(error) == 412:
                    if landed := self._find_landed(pushed):
                        self.echo("The answer to the commit was lost; the commit is there")
                        return landed
                self.remote.words = before
                if wait is None or not is_transient(error):
                    raise
                pause(error, wait, self.echo)
            else:
                if not target.create_pr:
                    return replace(pushed, commit=info.oid)
                return replace(pushed, commit=info.oid, revision=info.pr_revision, pull_request=info.pr_url)

    def _find_landed(self, pushed: Pushed) -> Pushed | None:
        if self.target.create_pr:
            return self._find_pull_request(pushed)
        info = patiently(self.api.model_info, self.target.repo_id, revision=self.target.revision, echo=self.echo)
        if info.sha != self.access.head and self._is_there(info.sha):
            return replace(pushed, commit=info.sha)
        return None

    def _find_pull_request(self, pushed: Pushed) -> Pushed | None:
        """An open one of ours with this title and these files."""
        repo_id, author = self.target.repo_id, self.access.user

        def find() -> list[Discussion]:  # anew at each try: a generator that has raised says that there is none
            return list(self.api.get_repo_discussions(repo_id, author=author, discussion_type="pull_request"))

        for talk in patiently(find, echo=self.echo):
            revision = f"refs/pr/{talk.num}"
            if talk.author == author and talk.status in ("open", "draft") and talk.title == self.message:
                info = patiently(self.api.model_info, repo_id, revision=revision, echo=self.echo)
                if self._is_there(info.sha):
                    return replace(pushed, commit=info.sha, revision=revision, pull_request=talk.url)
        return None

    def _is_there(self, commit: str) -> bool:
        files = list_files(self.api, self.target.repo_id, commit)
        changed, _ = split(self.items, files)
        return not changed and not left_over(self.items, files)


def visibility(private: bool | None) -> str:
    return "private" if private else "public"


def _parts(additions: list[CommitOperationAdd]) -> list[list[CommitOperationAdd]]:
    """What to upload with one call. With LFS each file counts once it is whole; hf_xet keeps nothing of a broken call,
    so that it gets each file of weights alone."""
    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return [additions]
    weights = [addition for addition in additions if addition.path_in_repo.endswith(".safetensors")]
    others = [addition for addition in additions if addition not in weights]
    return [[addition] for addition in weights] + [others]
