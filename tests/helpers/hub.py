"""A small Hub on the loopback, in memory: models are created, pushed, listed and downloaded over HTTP.

Strict where a push can go wrong: tokens, unknown repositories and revisions, sha256 and size of large files, pointers
to files that were not uploaded, front matter of the card, and no token on the address of a large file.
"""

import base64
import fnmatch
import hashlib
import json
import re
import secrets
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

USER, TOKEN = "me", "hf_write"
DATE = "2026-01-01T00:00:00.000Z"
LARGE = ("*.bin", "*.pt", "*.pth", "*.safetensors", "*.png", "*tfevents*")
MODEL = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"


class Refused(Exception):
    def __init__(self, status, message, code=""):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Repository:
    """Files by path, each a dict with `data` or `sha256`, at each commit of the one branch."""

    def __init__(self, name):
        self.name = name
        self.commits = []  # (id, title, files)
        self.add({".gitattributes": text_file("".join(f"{name} filter=lfs\n" for name in LARGE).encode())}, "initial")

    def add(self, files, title):
        self.commits.append((secrets.token_hex(20), title, files))

    def at(self, revision):
        """The id and the files of a commit."""
        for commit, _, files in reversed(self.commits):
            if revision in ("main", commit):
                return commit, files
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def blob_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def text_file(data):
    return {"data": data, "oid": blob_id(data), "size": len(data)}


def large_file(sha256, size):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return {"sha256": sha256, "oid": blob_id(pointer), "size": size, "pointer": len(pointer)}


def card_errors(text):
    """What the Hub refuses in the front matter of a README."""
    front = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        fields = yaml.safe_load(front[1]) if front else {}
    except yaml.YAMLError as error:
        return [f"YAML error: {error}"]
    if not isinstance(fields, dict):
        return ["metadata must be a mapping"]
    wrong = [key for key in ("license", "library_name", "pipeline_tag") if not isinstance(fields.get(key, ""), str)]
    tags = fields.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        wrong.append("tags")
    return [f'"{key}" has a wrong type' for key in wrong]


class Hub:
    """`files("me/x")`: what a model holds now. `log`: method and path of every request."""

    def __init__(self):
        self.repositories, self.uploads, self.log = {}, {}, []
        self.lock = threading.Lock()
        self.address = ""

    def files(self, name):
        """Contents by path."""
        _, files = self.repositories[name].at("main")
        return {path: file.get("data") or self.uploads[file["sha256"]] for path, file in files.items()}

    def titles(self, name):
        return [title for _, title, _ in self.repositories[name].commits]

    # Requests. Each returns (status, headers, JSON or bytes).

    def answer(self, method, address, headers, body):
        path = urlsplit(address).path
        self.log.append((method, path))
        for methods, pattern, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in methods:
                groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                with self.lock:
                    return action(self, Request(headers, body), **groups)
        raise Refused(404, f"no route for {method} {path}")

    def repository(self, request, name, write=False):
        if write:
            request.check_user()
        if name not in self.repositories:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repositories[name]

    def whoami(self, request):
        request.check_user()
        access = {"type": "access_token", "accessToken": {"displayName": "t", "role": "write"}}
        return 200, {}, {"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": [], "auth": access}

    def check_card(self, request):
        errors = [{"message": error} for error in card_errors(request.json()["content"])]
        return 400 if errors else 200, {}, {"errors": errors, "warnings": []}

    def create(self, request):
        request.check_user()
        fields = request.json()
        if fields.get("organization") not in (None, USER):
            raise Refused(403, f"You have no rights in the namespace {fields['organization']}")
        name = f"{USER}/{fields['name']}"
        answer = {"url": f"{self.address}/{name}", "name": name, "id": name}
        if name in self.repositories:
            return 409, {}, answer | {"error": "You already created this model repo"}
        self.repositories[name] = Repository(name)
        return 200, {}, answer

    def info(self, request, name, revision="main"):
        commit, files = self.repository(request, name).at(revision)
        names = [{"rfilename": path} for path in sorted(files)]
        dates = {"lastModified": DATE, "createdAt": DATE}
        state = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return 200, {}, {"id": name, "modelId": name, "sha": commit, "siblings": names, **dates, **state}

    def tree(self, request, name, revision, folder=""):
        _, files = self.repository(request, name).at(revision)
        inside = {path: file for path, file in files.items() if path.startswith(f"{folder}/" if folder else "")}
        if folder and not inside:
            raise Refused(404, f"{folder} does not exist", "EntryNotFound")
        return 200, {}, [entry(path, file) for path, file in sorted(inside.items())]

    def paths(self, request, name, revision):
        _, files = self.repository(request, name).at(revision)
        return 200, {}, [entry(path, files[path]) for path in request.json()["paths"] if path in files]

    def refs(self, request, name):
        commit, _ = self.repository(request, name).at("main")
        branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit}
        return 200, {}, {"branches": [branch], "tags": [], "converts": [], "pullRequests": []}

    def history(self, request, name, revision):
        commits = self.repository(request, name).commits
        rows = [
            {"id": commit, "title": title, "message": "", "date": DATE, "authors": []} for commit, title, _ in commits
        ]
        return 200, {}, rows[::-1]

    # Uploads

    def preupload(self, request, name, revision):
        _, files = self.repository(request, name, write=True).at(revision)
        rows = []
        for file in request.json()["files"]:
            binary = b"\0" in base64.b64decode(file.get("sample", ""))
            large = binary or any(fnmatch.fnmatch(file["path"].rpartition("/")[2], pattern) for pattern in LARGE)
            rows.append({"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
        return 200, {}, {"files": rows}

    def batch(self, request, name):
        self.repository(request, name, write=True)
        rows = []
        for file in request.json()["objects"]:
            if file["oid"] not in self.uploads:
                actions = {
                    "upload": {"href": f"{self.storage}/storage/{file['oid']}"},
                    "verify": {"href": f"{self.address}/verify"},
                }
                file = {**file, "actions": actions}
            rows.append(file)
        return 200, {"Content-Type": "application/vnd.git-lfs+json"}, {"transfer": "basic", "objects": rows}

    @property
    def storage(self):
        """Another origin, as the Hub's."""
        return self.address.replace("127.0.0.1", "localhost")

    def store(self, request, sha256):
        request.check_no_token()
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise Refused(400, "the content has another sha256")
        self.uploads[sha256] = request.body
        return 200, {}, {}

    def verify(self, request):
        file = request.json()
        if len(self.uploads.get(file["oid"], b"")) != file["size"]:
            raise Refused(404, "the uploaded file is missing or of another size")
        return 200, {}, {}

    def commit(self, request, name, revision):
        repository = self.repository(request, name, write=True)
        header, *operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        files = dict(repository.at(revision)[1])
        for operation in operations:
            value, path = operation["value"], operation["value"]["path"]
            if operation["key"] == "file":
                data = base64.b64decode(value["content"])
                if path == "README.md" and (errors := card_errors(data.decode())):
                    raise Refused(400, f"Invalid metadata in README.md: {errors}")
                files[path] = text_file(data)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.uploads:
                    raise Refused(400, f"{path} points to a file that was not uploaded")
                files[path] = large_file(value["oid"], len(self.uploads[value["oid"]]))
            elif operation["key"] == "deletedFile":
                del files[path]
            else:
                raise Refused(400, f"unknown operation {operation['key']}")
        repository.add(files, header["value"]["summary"])
        commit, _ = repository.at("main")
        return 200, {}, {"success": True, "commitOid": commit, "commitUrl": f"{self.address}/{name}/commit/{commit}"}

    # Downloads

    def resolve(self, request, name, revision, path):
        commit, files = self.repository(request, name).at(revision)
        headers = {"X-Repo-Commit": commit}
        if path not in files:
            return 404, {**headers, "X-Error-Code": "EntryNotFound"}, {"error": "Entry not found"}
        file = files[path]
        if "data" in file:
            return 200, {**headers, "ETag": f'"{file["oid"]}"', "Content-Type": "text/plain"}, file["data"]
        headers |= {"X-Linked-Etag": f'"{file["sha256"]}"', "X-Linked-Size": str(file["size"])}
        return 302, {**headers, "Location": f"{self.storage}/storage/{file['sha256']}"}, b""

    def fetch(self, request, sha256):
        request.check_no_token()
        return 200, {"ETag": f'"{sha256}"'}, self.uploads[sha256]


def entry(path, file):
    row = {"type": "file", "path": path, "oid": file["oid"], "size": file["size"]}
    if "sha256" in file:
        row["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": file["pointer"]}
    return row


class Request:
    def __init__(self, headers, body):
        self.headers, self.body = headers, body

    def json(self):
        return json.loads(self.body)

    def check_user(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Invalid username or password.")

    def check_no_token(self):
        if "Authorization" in self.headers:
            raise Refused(400, "the token must not travel to the storage")


ROUTES = [
    ("GET", "/api/whoami-v2", Hub.whoami),
    ("POST", "/api/validate-yaml", Hub.check_card),
    ("POST", "/api/repos/create", Hub.create),
    ("GET", MODEL + f"(?:/revision/{REVISION})?", Hub.info),
    ("GET", MODEL + f"/tree/{REVISION}(?:/(?P<folder>.*))?", Hub.tree),
    ("POST", MODEL + f"/paths-info/{REVISION}", Hub.paths),
    ("GET", MODEL + "/refs", Hub.refs),
    ("GET", MODEL + f"/commits/{REVISION}", Hub.history),
    ("POST", MODEL + f"/preupload/{REVISION}", Hub.preupload),
    ("POST", r"/(?P<name>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", Hub.batch),
    ("PUT", "/storage/(?P<sha256>[0-9a-f]{64})", Hub.store),
    ("POST", "/verify", Hub.verify),
    ("POST", MODEL + f"/commit/{REVISION}", Hub.commit),
    (("GET", "HEAD"), r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/" + REVISION + "/(?P<path>.+)", Hub.resolve),
    (("GET", "HEAD"), "/storage/(?P<sha256>[0-9a-f]{64})", Hub.fetch),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Transfer-Encoding"):
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            status, headers, answer = self.server.hub.answer(self.command, self.path, self.headers, body)
        except Refused as error:
            status, answer = error.status, {"error": error.message}
            headers = {"X-Error-Message": error.message, **({"X-Error-Code": error.code} if error.code else {})}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET

    def _chunk(self):
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def log_message(self, *arguments):
        pass


@contextmanager
def running():
    """A Hub on a free port."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub, server.daemon_threads = hub, True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub, home, **more):
    """Variables for a program that is to use `hub`, which reads them when it imports huggingface_hub."""
    return {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",  # with hf_xet installed, an upload to a Hub without it fails
        "HF_HUB_OFFLINE": "0",
        **more,
    }


def run(command, hub, home, base, cwd):
    """Run `command` with the Hub as `environment` says; its standard output."""
    base = {name: value for name, value in base.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**base, **environment(hub, home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
