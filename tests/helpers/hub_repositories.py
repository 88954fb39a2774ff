"""Requests to the loopback Hub about users and repositories: who, create, settings, information, files, refs."""

import json
import re
import secrets
from urllib.parse import parse_qs

import yaml

from tests.helpers.hub_cards import SDKS, front_matter
from tests.helpers.hub_repository import Repository, blob_id, find_repository, owns
from tests.helpers.hub_request import (
    API,
    NAME,
    ORGANISATIONS,
    REVISION,
    Refused,
    json_answer,
    namespaces,
    route,
)


@route("GET", "/api/whoami-v2")
def whoami(hub, request):
    name, role = request.needs_user()
    organisations = [{"type": "org", "name": other, "roleInOrg": "admin"} for other in ORGANISATIONS[name]]
    access = {"type": "access_token", "accessToken": {"displayName": "t", "role": role}}
    user = {"type": "user", "id": name, "name": name, "fullname": name}
    return json_answer({**user, "orgs": organisations, "auth": access})


@route("GET", "/api/agent-harnesses")
def harnesses(hub, request):
    return json_answer({"standardEnvVars": [], "harnesses": {}})


@route("POST", "/api/repos/create")
def create(hub, request):
    fields, user = request.json(), request.needs_user()
    owner, kind = fields.get("organization") or user[0], fields.get("type") or "model"
    if user[1] != "write" or owner not in namespaces(user):
        raise Refused(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
    wrong = re.search(r"--|\.\.|^[.-]|[.-]$|\.git$", fields["name"])
    if wrong or not re.fullmatch(r"[\w.-]{1,96}", fields["name"]):
        raise Refused(400, "Invalid repo name")
    if kind == "space" and fields.get("sdk") not in SDKS:
        raise Refused(400, '"sdk" is required for Spaces')
    private = fields.get("visibility") == "private" or bool(fields.get("private"))
    repository = Repository(kind, f"{owner}/{fields['name']}", private, fields.get("sdk"))
    address = f"{hub.address}/{repository.prefix}{repository.name}"
    if (kind, repository.name) in hub.repositories:
        message = f"You already created this {kind} repo: {repository.name}"
        return json_answer({"error": message, "url": address}, 409, **{"X-Error-Message": message})
    hub.repositories[kind, repository.name] = repository
    return json_answer({"url": address, "name": repository.name, "id": secrets.token_hex(12)})


@route("DELETE", "/api/repos/delete")
def delete(hub, request):
    fields, user = request.json(), request.needs_user()
    kind, name = fields.get("type") or "model", f"{fields.get('organization') or user[0]}/{fields['name']}"
    find_repository(hub, request, kind, name, write=True)
    del hub.repositories[kind, name]
    return json_answer("OK")


@route("PUT", API + NAME + "/settings")
def settings(hub, request, kind, name):
    repository, fields = find_repository(hub, request, kind, name, write=True), request.json()
    repository.gated = fields.get("gated", repository.gated)
    if "visibility" in fields:
        repository.private = fields["visibility"] == "private"
    repository.private = fields.get("private", repository.private)
    return json_answer({})


@route("GET", "/api/(?P<kind>model|dataset|space)s")
def listing(hub, request, kind):
    user, author, rows = request.user(), request.query.get("author"), []
    for repository in hub.repositories.values():
        hidden = repository.private and not owns(user, repository)
        if repository.kind == kind and not hidden and author in (None, repository.name.split("/")[0]):
            names = {"id": repository.name, "modelId": repository.name, "createdAt": repository.created}
            rows.append({**names, "private": repository.private, "tags": [], "likes": 0, "downloads": 0})
    return json_answer(rows)


@route("GET HEAD", API + NAME + f"(?:/revision/{REVISION})?")
def info(hub, request, kind, name, revision="main"):
    repository = find_repository(hub, request, kind, name)
    commit = repository.find(revision)
    files, card = repository.files(commit), card_of(repository.files(commit))
    config = json.loads(files["config.json"]["data"]) if "data" in files.get("config.json", {}) else {}
    tags = list(card.get("tags") or [])
    tags += [f"license:{card['license']}"] if "license" in card else []
    tags += ["custom_code"] if "auto_map" in config else []
    blobs = "blobs" in request.query
    answer = {
        "_id": "0", "id": name, "modelId": name, "author": name.split("/")[0], "sha": commit, "disabled": False,
        "private": repository.private, "gated": repository.gated, "createdAt": repository.created, "tags": tags,
        "lastModified": repository.commits[commit]["date"], "downloads": 0, "likes": 0, "cardData": card,
        "usedStorage": sum(file["size"] for file in files.values()),
        "siblings": [sibling(path, file, blobs) for path, file in sorted(files.items())],
    }  # fmt: skip
    answer |= {key: card[key] for key in ("library_name", "pipeline_tag", "model-index") if key in card}
    if config:
        answer["config"] = {key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config}
    if kind == "space":
        hardware = {"current": None, "requested": "cpu-basic"}
        runtime = {"stage": "NO_APP_FILE", "hardware": hardware, "storage": None}
        answer |= {"sdk": card.get("sdk", repository.sdk), "runtime": runtime}
    return json_answer(answer)


def card_of(files):
    """Fields of the card; empty where it has none that can be read."""
    try:
        return front_matter(files["README.md"]["data"].decode()) or {}
    except (KeyError, yaml.YAMLError):
        return {}


def sibling(path, file, blobs):
    row = {"rfilename": path}
    if blobs:
        row |= {"size": file["size"], "blobId": file["oid"], **lfs_fields(file)}
    return row


def lfs_fields(file):
    if "sha256" not in file:
        return {}
    names = {"oid": file["sha256"], "sha256": file["sha256"]}
    return {"lfs": {**names, "size": file["size"], "pointerSize": file["pointer"]}}


@route("GET", API + NAME + "/auth-check(?P<write>/write)?")
def auth_check(hub, request, kind, name, write=None):
    find_repository(hub, request, kind, name, write=bool(write), files=True)
    return json_answer("OK")


@route("GET", API + NAME + f"/tree/{REVISION}(?:/(?P<folder>.*))?")
def tree(hub, request, kind, name, revision, folder=""):
    files, prefix = find_repository(hub, request, kind, name).files(revision), f"{folder}/" if folder else ""
    inside = {path: file for path, file in sorted(files.items()) if path.startswith(prefix)}
    if folder and not inside:
        raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    folders = set()
    for path in inside:
        parts = path.removeprefix(prefix).split("/")
        folders |= {prefix + "/".join(parts[:depth]) for depth in range(1, len(parts))}
    rows = [{"type": "directory", "path": path, "oid": blob_id(path.encode()), "size": 0} for path in sorted(folders)]
    rows += [entry(hub, path, file) for path, file in inside.items()]
    recursive = request.query.get("recursive", "").lower() in ("true", "1")
    if not recursive:
        rows = [row for row in rows if "/" not in row["path"].removeprefix(prefix)]
    start, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 1000))
    more = {}
    if start + limit < len(rows):
        query = f"recursive={recursive}&limit={limit}&cursor={start + limit}"
        more["Link"] = f'<{hub.address}{request.path}?{query}>; rel="next"'
    return json_answer(rows[start : start + limit], **more)


@route("POST", API + NAME + f"/paths-info/{REVISION}")
def paths(hub, request, kind, name, revision):
    files = find_repository(hub, request, kind, name).files(revision)
    if "json" in request.headers.get("content-type", ""):
        asked = request.json()["paths"]
    else:
        asked = parse_qs(request.body.decode()).get("paths", [])
    rows = [entry(hub, path, files[path]) for path in asked if path in files]
    folders = [path for path in asked if any(name.startswith(f"{path}/") for name in files)]
    return json_answer(rows + [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders])


def entry(hub, path, file):
    """A file in a listing."""
    row = {"type": "file", "path": path, "oid": file["oid"], "size": file["size"], **lfs_fields(file)}
    if xet_hash := hub.xet and hub.xet.hash(file.get("sha256")):
        row["xetHash"] = xet_hash
    return row


@route("GET", API + NAME + "/refs")
def refs(hub, request, kind, name):
    repository = find_repository(hub, request, kind, name)

    def under(prefix):
        named = [(ref, commit) for ref, commit in repository.refs.items() if ref.startswith(prefix)]
        return [{"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": commit} for ref, commit in named]

    branches, tags, requests = under("refs/heads/"), under("refs/tags/"), under("refs/pr/")
    return json_answer({"branches": branches, "tags": tags, "converts": [], "pullRequests": requests})


@route("GET", API + NAME + f"/commits/{REVISION}")
def history(hub, request, kind, name, revision):
    repository, rows = find_repository(hub, request, kind, name), []
    for commit in repository.history(revision):
        made = repository.commits[commit]
        rows.append({"id": commit, "title": made["title"], "message": "", "date": made["date"], "authors": []})
    return json_answer(rows)


@route("POST DELETE", API + NAME + "/(?P<what>branch|tag)/(?P<ref>[^/]+)")
def change_ref(hub, request, kind, name, what, ref):
    repository = find_repository(hub, request, kind, name, write=True)
    fields = json.loads(request.body or b"{}")
    full = f"refs/heads/{ref}" if what == "branch" else f"refs/tags/{fields.get('tag', ref)}"
    if request.method == "DELETE":
        repository.refs.pop(full, None)
        return json_answer({})
    if full in repository.refs:
        raise Refused(409, f"Reference already exists: {full}")
    repository.refs[full] = repository.find(fields.get("startingPoint", "main") if what == "branch" else ref)
    return json_answer({})
