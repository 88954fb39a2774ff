"""What each part of the loopback Hub builds on: a request, a refusal, the table of routes."""

import json
import re
from datetime import UTC, datetime
from urllib.parse import parse_qs

NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
API = r"/api/(?P<kind>model|dataset|space)s/"
PLAIN = r"/(?:(?P<kind>dataset|space)s/)?" + NAME  # outside of /api a model has no prefix
REVISION = r"(?P<revision>[^/]+)"
SHA256 = r"(?P<sha256>[0-9a-f]{64})"

TOKENS = {"hf_write": ("me", "write"), "hf_read": ("me", "read"), "hf_other": ("stranger", "write")}
ORGANISATIONS = {"me": ["org"], "stranger": []}

ROUTES = []  # (methods, compiled pattern, function of hub, request and the pattern's groups)


class Refused(Exception):
    """An answer with an error status, in the Hub's headers and in the body."""

    def __init__(self, status, message, code="", **headers):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class Request:
    def __init__(self, method, path, query, headers, body):
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.query = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}

    def json(self):
        return json.loads(self.body)

    def user(self):
        """Name and role of the token's owner, or None without a token."""
        header = self.headers.get("authorization")
        if header is None:
            return None
        if header.removeprefix("Bearer ") not in TOKENS:
            raise Refused(401, "Invalid credentials in Authorization header")
        return TOKENS[header.removeprefix("Bearer ")]

    def needs_user(self):
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        return user

    def check_no_token(self):
        """As the storage behind the Hub: the token must not travel there."""
        if "authorization" in self.headers:
            raise Refused(400, "Only one auth mechanism allowed")


def namespaces(user):
    """Where a user may write: under the own name and those of the own organisations."""
    return [user[0], *ORGANISATIONS[user[0]]]


def route(methods, pattern):
    def add(function):
        ROUTES.append((methods.split(), re.compile(pattern), function))
        return function

    return add


def json_answer(content, status=200, **headers):
    return status, {"Content-Type": "application/json", **headers}, json.dumps(content).encode()


def now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
