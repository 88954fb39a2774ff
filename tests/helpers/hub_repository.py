"""A repository of the loopback Hub: files by path at each commit; branches, tags and pull requests name commits."""

import hashlib
import secrets

from tests.helpers.hub_request import Refused, namespaces, now

LARGE = (
    "*.7z *.arrow *.bin *.gz *.h5 *.model *.msgpack *.npy *.npz *.onnx *.parquet *.pkl *.pt *.pth *.safetensors *.tar "
    "*.zip *tfevents*"
).split()
SPACE_CARD = """---
title: {title}
emoji: 🏢
colorFrom: red
colorTo: blue
sdk: {sdk}
app_file: app.py
pinned: false
---
"""


class Repository:
    """`private`, `gated`, `granted` (users let through the gate) may be set by a test."""

    def __init__(self, kind, name, private=False, sdk=None):
        self.kind, self.name, self.private, self.sdk = kind, name, private, sdk
        self.gated, self.granted, self.created = False, set(), now()
        self.commits, self.refs, self.discussions = {}, {}, {}
        attributes = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE)
        files = {".gitattributes": text_file(attributes.encode())}
        if kind == "space":
            files["README.md"] = text_file(SPACE_CARD.format(title=name.split("/")[1], sdk=sdk).encode())
        self.refs["refs/heads/main"] = self.add_commit(files, "initial commit", [])

    @property
    def prefix(self):
        return "" if self.kind == "model" else f"{self.kind}s/"

    def add_commit(self, files, title, parents):
        commit = secrets.token_hex(20)
        self.commits[commit] = {"files": files, "title": title, "parents": parents, "date": now()}
        return commit

    def find(self, revision):
        """The commit that a branch, tag, ref or (short) commit id names."""
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        found = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        if len(found) != 1:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def files(self, revision):
        return self.commits[self.find(revision)]["files"]

    def history(self, revision):
        """Commit ids, the newest first."""
        commit = self.find(revision)
        while commit:
            yield commit
            commit = (self.commits[commit]["parents"] or [None])[0]

    def open_pull_request(self, title, description, author, base="main", status="draft"):
        number = len(self.discussions) + 1
        self.refs[f"refs/pr/{number}"] = self.find(base)
        text = {"edited": False, "hidden": False, "latest": {"raw": description or "", "updatedAt": now()}}
        self.discussions[number] = {
            "num": number, "title": title, "author": {"name": author}, "createdAt": now(), "status": status,
            "isPullRequest": True, "diff": "", "filesWithConflicts": [], "changes": {"base": f"refs/heads/{base}"},
            "repo": {"name": self.name, "type": self.kind}, "events": [event("comment", author, text)],
        }  # fmt: skip
        return number


def owns(user, repository):
    return user is not None and repository.name.split("/")[0] in namespaces(user)


def find_repository(hub, request, kind, name, write=False, files=False):
    """The repository, if the request's user may see it, write it, read its files."""
    user, repository = request.user(), hub.repositories.get((kind, name))
    if repository is None or (repository.private and not owns(user, repository)):
        status, message = (404, "Repository not found") if user else (401, "Invalid username or password.")
        raise Refused(status, message, "RepoNotFound")
    if write:
        if user is None:
            raise Refused(401, "Invalid username or password.", "RepoNotFound")
        if user[1] != "write" or not owns(user, repository):
            raise Refused(403, "Forbidden: you must use a write token to upload to a repository")
    if files and repository.gated and not owns(user, repository) and (not user or user[0] not in repository.granted):
        message = f"Access to model {name} is restricted. Visit the model page to ask for access."
        raise Refused(403 if user else 401, message, "GatedRepo")
    return repository


def event(kind, author, data):
    return {"id": secrets.token_hex(6), "type": kind, "createdAt": now(), "author": {"name": author}, "data": data}


def blob_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def text_file(data):
    return {"data": data, "oid": blob_id(data), "size": len(data)}


def large_file(sha256, size):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return {"sha256": sha256, "oid": blob_id(pointer), "size": size, "pointer": len(pointer)}
