"""The loopback Hub as an HTTP server: routes, faults that a test asks for, and a log of every request."""

import asyncio
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from tests.helpers import hub_cards, hub_commits, hub_repositories, hub_storage, hub_xet
from tests.helpers.hub_request import ROUTES, Refused, Request, json_answer

PARTS = (hub_cards, hub_commits, hub_repositories, hub_storage, hub_xet)  # importing them fills ROUTES


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" has `match` in it."""

    match: str  # a regular expression
    times: int = 1
    skip: int = 0  # so many of them go through first
    status: int | None = None  # this answer in place of the right one
    headers: dict = field(default_factory=dict)
    after: int | None = None  # the connection ends when so many bytes of the body have come
    call: object = None  # a function to call at that moment
    lost: bool = False  # the request is done, but the connection ends before the answer


class Hub:
    """`repositories` by (kind, name). `log`: a dict for each request (method, path, query, host, token, size, status).

    A test may set `address` (where it listens) aside and read the rest.
    """

    def __init__(self, folder, part_size=0, xet=False):
        self.repositories, self.log, self.faults = {}, [], []
        self.storage = hub_storage.Storage(folder / "lfs", part_size)
        self.xet = hub_xet.Xet(folder / "xet") if xet else None
        self.address = ""

    @property
    def other_origin(self):
        """Where the large files are, as the Hub's."""
        return self.address.replace("127.0.0.1", "localhost")

    def size_of(self, sha256):
        """Of a large file, or None."""
        size = self.storage.size(sha256)
        return self.xet.size(sha256) if size is None and self.xet else size

    # For tests

    def files(self, name, revision="main", type="model"):
        """Contents by path of a model or a Space."""
        files = self.repositories[type, name].files(revision)
        return {path: file["data"] if "data" in file else self.content(file["sha256"]) for path, file in files.items()}

    def content(self, sha256):
        if self.storage.size(sha256) is None and self.xet:
            return self.xet.content(sha256)
        return self.storage.path(sha256).read_bytes()

    def titles(self, name, revision="main", type="model"):
        """Of the commits of a model or a Space, the oldest first."""
        repository = self.repositories[type, name]
        return [repository.commits[commit]["title"] for commit in repository.history(revision)][::-1]

    def fault(self, match, **fields):
        self.faults.append(Fault(match, **fields))

    def requests(self, match):
        """The rows of the log whose "METHOD path" has the regular expression in it."""
        return [row for row in self.log if re.search(match, f"{row['method']} {row['path']}")]

    # The server

    def answer(self, request):
        """(status, headers, body)."""
        try:
            for methods, pattern, action in ROUTES:
                match = pattern.fullmatch(request.path)
                if match and request.method in methods:
                    groups = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    return action(self, request, **groups)
            raise Refused(404, f"no route for {request.method} {request.path}")
        except Refused as error:
            return json_answer({"error": error.message}, error.status, **error.headers)

    def next_fault(self, row):
        for fault in self.faults:
            if re.search(fault.match, f"{row['method']} {row['path']}"):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                return fault
        return Fault("")

    async def __call__(self, scope, receive, send):
        """One HTTP request (ASGI). The raw path, in which `refs%2Fpr%2F1` stays one part, is matched."""
        path, query = scope["raw_path"].decode().partition("?")[0], scope["query_string"].decode()
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        row = {"method": scope["method"], "path": path, "query": query, "host": headers["host"].split(":")[0]}
        row |= {"token": "authorization" in headers, "status": None}
        self.log.append(row)
        fault = self.next_fault(row)
        body = await read(receive, fault)
        row["size"] = len(body)
        if fault.after is not None:
            row["status"] = "cut"
            return await end(send)
        if fault.status is not None:
            status, headers, content = json_answer({"error": "injected"}, fault.status, **fault.headers)
        else:
            status, headers, content = self.answer(Request(scope["method"], path, query, headers, body))
        row["status"] = "lost" if fault.lost else status
        if fault.lost:
            if fault.call:
                fault.call()
            return await end(send)
        headers["Content-Length"] = str(len(content))
        pairs = [(name.encode(), str(value).encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


async def read(receive, fault):
    """The body; only its first bytes where a fault ends it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if fault.after is not None and (len(body) >= fault.after or not message.get("more_body")):
            if fault.call:
                fault.call()
            return body
        if not message.get("more_body"):
            return body


async def end(send):
    """Reset the connection. uvicorn's request, whose method `send` is, holds it."""
    send.__self__.transport.abort()
    await asyncio.sleep(0.01)  # until uvicorn has seen it
