"""Commits and pull requests of the loopback Hub."""

import base64
import fnmatch
import json

from tests.helpers.hub_cards import check_card
from tests.helpers.hub_repository import event, find_repository, large_file, text_file
from tests.helpers.hub_request import API, NAME, REVISION, Refused, json_answer, route

NUMBER = r"/discussions/(?P<number>\d+)"
SMALL = 10_000_000  # bytes; a larger file is stored outside of git


@route("POST", API + NAME + f"/preupload/{REVISION}")
def preupload(hub, request, kind, name, revision):
    """How each file is to be uploaded."""
    repository, fields = repository_for_commit(hub, request, kind, name), request.json()
    files = repository.files(revision)
    large = [line.split()[0] for line in lines_of(files, ".gitattributes") if "filter=lfs" in line]
    ignored = (fields.get("gitIgnore") or "").splitlines() or lines_of(files, ".gitignore")
    ignored = [line.strip() for line in ignored if line.strip() and not line.startswith("#")]
    rows = []
    for file in fields["files"]:
        path, binary = file["path"], b"\0" in base64.b64decode(file.get("sample", ""))
        named = any(fnmatch.fnmatch(path.rpartition("/")[2], pattern) for pattern in large)
        row = {"path": path, "uploadMode": "lfs" if binary or named or file["size"] > SMALL else "regular"}
        patterns = [each for line in ignored for each in (line, line.rstrip("/") + "/*")]
        row["shouldIgnore"] = any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
        if path in files:
            row["oid"] = files[path].get("sha256") or files[path]["oid"]
        rows.append(row)
    return json_answer({"files": rows})


def lines_of(files, path):
    return files[path]["data"].decode().splitlines() if path in files else []


def repository_for_commit(hub, request, kind, name):
    """Whoever sees a repository may open a pull request; a commit needs the right to write."""
    pull_request = "create_pr" in request.query
    repository = find_repository(hub, request, kind, name, write=not pull_request)
    if request.user() is None:
        raise Refused(401, "Invalid username or password.", "RepoNotFound")
    return repository


@route("POST", API + NAME + f"/commit/{REVISION}")
def commit(hub, request, kind, name, revision):
    repository = repository_for_commit(hub, request, kind, name)
    header, *operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    header, parent = header["value"], repository.find(revision)
    ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
    if "create_pr" not in request.query and ref not in repository.refs:
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    if not parent.startswith(header.get("parentCommit") or ""):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    files = dict(repository.files(parent))
    for operation in operations:
        apply(hub, kind, files, operation["key"], operation["value"])
    address, answer = f"{hub.address}/{repository.prefix}{name}", {}
    if "create_pr" in request.query:
        author, text = request.user()[0], header.get("description")
        number = repository.open_pull_request(header["summary"], text, author, revision)
        ref, answer = f"refs/pr/{number}", {"pullRequestUrl": f"{address}/discussions/{number}"}
    made = repository.refs[ref] = repository.add_commit(files, header["summary"], [parent])
    commit_url = f"{address}/commit/{made}"
    return json_answer({"success": True, "commitOid": made, "commitUrl": commit_url, "hookOutput": "", **answer})


def apply(hub, kind, files, key, value):
    """One operation of a commit, done to `files`."""
    path = value["path"]
    if key == "file":
        data = base64.b64decode(value["content"])
        errors = check_card(data.decode(), kind)[0] if path == "README.md" else []
        if errors:
            raise Refused(400, f"Invalid metadata in README.md: {errors}")
        files[path] = text_file(data)
    elif key == "lfsFile":
        size = hub.size_of(value["oid"])
        if size is None or value.get("size", size) != size:
            raise Refused(400, f"Your push was rejected because an LFS pointer pointed to a missing file: {path}")
        files[path] = large_file(value["oid"], size)
    elif key in ("deletedFile", "deletedFolder"):
        inside = path.rstrip("/") + "/"
        gone = [name for name in files if name == path or (key == "deletedFolder" and name.startswith(inside))]
        if not gone:
            raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        for name in gone:
            del files[name]
    else:
        raise Refused(400, f"unknown operation {key}")


@route("POST", API + NAME + "/discussions")
def discuss(hub, request, kind, name):
    repository, fields, user = find_repository(hub, request, kind, name), request.json(), request.needs_user()
    if not fields.get("pullRequest"):
        raise Refused(501, "This Hub knows only pull requests")
    if not 3 <= len(fields["title"]) <= 200:
        raise Refused(400, "title must be 3 to 200 characters")
    number = repository.open_pull_request(fields["title"], fields.get("description"), user[0])
    address = f"{hub.address}/{repository.prefix}{name}/discussions/{number}"
    return json_answer({"num": number, "url": address, "pullRequest": True})


@route("GET", API + NAME + NUMBER)
def discussion(hub, request, kind, name, number):
    discussions = find_repository(hub, request, kind, name).discussions
    if int(number) not in discussions:
        raise Refused(404, "Discussion not found")
    return json_answer(discussions[int(number)])


@route("GET", API + NAME + "/discussions")
def discussions(hub, request, kind, name):
    rows = list(find_repository(hub, request, kind, name).discussions.values())
    return json_answer({"discussions": rows, "count": len(rows), "start": 0})


@route("POST", API + NAME + NUMBER + "/(?P<what>merge|status)")
def change_discussion(hub, request, kind, name, number, what):
    repository = find_repository(hub, request, kind, name, write=True)
    talk, ref = repository.discussions[int(number)], f"refs/pr/{number}"
    if what == "status":
        talk["status"] = request.json()["status"]
    else:
        main = repository.refs["refs/heads/main"]
        if talk["status"] != "open":
            raise Refused(400, f"Cannot merge a pull request in status {talk['status']}")
        if repository.refs[ref] == main:
            raise Refused(400, "nothing to merge")
        merged = repository.add_commit(dict(repository.files(ref)), f"{talk['title']} (#{number})", [main])
        repository.refs["refs/heads/main"] = talk["changes"]["mergeCommitId"] = merged
        talk["status"] = "merged"
    talk["events"].append(event("status-change", request.user()[0], {"status": talk["status"]}))
    return json_answer({"newStatus": talk["events"][-1]})
