"""Large files of the loopback Hub: git-LFS uploads in one or several parts, and plain downloads.

The addresses of the contents are of another origin than the Hub's, as the real ones, and refuse the user's token.
"""

import hashlib
import re

from tests.helpers.hub_repository import find_repository
from tests.helpers.hub_request import PLAIN, SHA256, Refused, json_answer, route


class Storage:
    """Contents by sha256 in a folder."""

    def __init__(self, folder, part_size):
        self.folder, self.part_size = folder, part_size
        self.expected = {}  # sizes by sha256, as the batch request gave them
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha256):
        return self.folder / sha256

    def part(self, sha256, number):
        return self.folder / f"{sha256}.part{number}"

    def size(self, sha256):
        return self.path(sha256).stat().st_size if self.path(sha256).exists() else None

    def store(self, sha256, content):
        size = self.expected.get(sha256, len(content))
        if hashlib.sha256(content).hexdigest() != sha256 or len(content) != size:
            raise Refused(400, "XAmzContentSHA256Mismatch")
        partial = self.path(f"{sha256}.partial")
        partial.write_bytes(content)
        partial.rename(self.path(sha256))


@route("POST", PLAIN + r"\.git/info/lfs/objects/batch")
def batch(hub, request, name, kind="model"):
    """Where to put what. Without a `ref` it is for a pull request, which whoever sees the repository may open."""
    find_repository(hub, request, kind, name, write="ref" in request.json())
    request.needs_user()
    rows = []
    for file in request.json()["objects"]:
        row = {"oid": file["oid"], "size": file["size"]}
        if hub.storage.size(file["oid"]) is None:
            hub.storage.expected[file["oid"]] = file["size"]
            verify_action = {"href": f"{hub.address}/_lfs_verify"}
            row["actions"] = {"upload": upload_action(hub, file["oid"], file["size"]), "verify": verify_action}
        rows.append(row)
    status, headers, content = json_answer({"transfer": "basic", "objects": rows})
    return status, {**headers, "Content-Type": "application/vnd.git-lfs+json"}, content


def upload_action(hub, sha256, size):
    part_size = hub.storage.part_size
    address = f"{hub.other_origin}/_lfs/{sha256}"
    if not part_size or size <= part_size:
        return {"href": f"{address}?X-Amz-Signature=signed"}
    count = -(-size // part_size)
    parts = {f"{number:05d}": f"{address}?part={number}&X-Amz-Signature=signed" for number in range(1, count + 1)}
    return {"href": f"{hub.address}/_lfs_complete/{sha256}", "header": {"chunk_size": str(part_size), **parts}}


@route("PUT", f"/_lfs/{SHA256}")
def put(hub, request, sha256):
    request.check_no_token()
    if "part" in request.query:
        hub.storage.part(sha256, int(request.query["part"])).write_bytes(request.body)
    else:
        hub.storage.store(sha256, request.body)
    return 200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'}, b""


@route("POST", f"/_lfs_complete/{SHA256}")
def complete(hub, request, sha256):
    parts = [hub.storage.part(sha256, part["partNumber"]) for part in request.json()["parts"]]
    hub.storage.store(sha256, b"".join(part.read_bytes() for part in parts))
    return json_answer({})


@route("POST", "/_lfs_verify")
def verify(hub, request):
    file = request.json()
    if hub.storage.size(file["oid"]) != file["size"]:
        raise Refused(404, "LFS object missing")
    return json_answer({})


@route("GET HEAD", PLAIN + r"/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(hub, request, name, revision, path, kind="model"):
    repository = find_repository(hub, request, kind, name, files=True)
    commit = repository.find(revision)
    headers = {"X-Repo-Commit": commit}
    file = repository.files(commit).get(path)
    if file is None:
        raise Refused(404, "Entry not found", "EntryNotFound", **headers)
    headers["ETag"] = f'"{file["oid"]}"'
    if "data" in file:
        return in_range(request, file["data"], {**headers, "Content-Type": "text/plain; charset=utf-8"})
    headers |= {"X-Linked-Etag": f'"{file["sha256"]}"', "X-Linked-Size": str(file["size"])}
    headers["Location"] = f"{hub.other_origin}/_lfs/{file['sha256']}?X-Amz-Signature=signed"
    if xet_hash := hub.xet and hub.xet.hash(file["sha256"]):
        token = f"{hub.address}/api/{kind}s/{name}/xet-read-token/{commit}"
        headers |= {"X-Xet-Hash": xet_hash, "Link": f'<{token}>; rel="xet-auth"'}
    return 302, headers, b""


@route("GET HEAD", f"/_lfs/{SHA256}")
def get(hub, request, sha256):
    request.check_no_token()
    if hub.storage.size(sha256) is None and hub.xet and hub.xet.hash(sha256):
        hub.storage.store(sha256, hub.xet.content(sha256))
    if hub.storage.size(sha256) is None:
        raise Refused(404, "NoSuchKey")
    content = hub.storage.path(sha256).read_bytes()
    return in_range(request, content, {"ETag": f'"{sha256}"', "Content-Type": "application/octet-stream"})


def in_range(request, content, headers):
    """The whole content, or the part that the request asks for."""
    headers["Accept-Ranges"] = "bytes"
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if asked is None:
        return 200, headers, content
    total = len(content)
    first, last = int(asked[1]), min(int(asked[2] or total - 1), total - 1)
    if first >= total:
        return 416, {"Content-Range": f"bytes */{total}"}, b""
    return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{total}"}, content[first : last + 1]
