"""Xet for the loopback Hub: the real hf_xet client, with a folder as its storage (`local://`) in place of a server."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.hub_repository import find_repository
from tests.helpers.hub_request import API, NAME, REVISION, Refused, json_answer, route

NEVER = 4102444800  # when its tokens end: in 2100
RECORD = 48  # bytes of each record of a shard file
DOWNLOAD = f"""
import sys, hf_xet
address, file_hash, size, target = sys.argv[1:]
session = hf_xet.XetSession()
with session.new_file_download_group(endpoint=address, token="x", token_expiry_unix_secs={NEVER}) as group:
    group.start_download_file(hf_xet.XetFileInfo(file_hash, int(size)), target)
"""


class Xet:
    """The files that clients have put into `folder`."""

    def __init__(self, folder):
        self.folder = folder.absolute()
        self.files = {}  # (xet hash, size) by sha256
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self):
        return f"local://{self.folder}"

    def hash(self, sha256):
        return self.files.get(sha256, (None, None))[0]

    def size(self, sha256):
        if sha256 not in self.files:
            self.scan()
        return self.files.get(sha256, (None, None))[1]

    def scan(self):
        """Read the clients' shard files (*.mdb): after the header a list of files, each a record with hash, flags and
        number of segments, then the segments, then their checksums (flag 31), then the sha256 (flag 30)."""
        for path in self.folder.rglob("*.mdb"):
            data, place = path.read_bytes(), RECORD
            while place + RECORD <= len(data) and data[place : place + 32] != b"\xff" * 32:
                file_hash = hexadecimal(data[place : place + 32])
                flags, count = number(data, place + 32), number(data, place + 36)
                segments = place + RECORD
                size = sum(number(data, segments + RECORD * segment + 36) for segment in range(count))
                place = segments + RECORD * count * (2 if flags & 1 << 31 else 1)
                if flags & 1 << 30:
                    self.files[hexadecimal(data[place : place + 32])] = (file_hash, size)
                    place += RECORD

    def content(self, sha256):
        """The file, for clients without xet. A child reads it, as the storage's index is locked by a process."""
        with tempfile.TemporaryDirectory() as home:
            target = Path(home) / "file"
            command = [sys.executable, "-c", DOWNLOAD, self.address, *map(str, self.files[sha256]), str(target)]
            environment = {**os.environ, "HF_HOME": home}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise Refused(503, f"xet: {done.stderr[-300:]}")
            return target.read_bytes()


def number(data, place):
    return int.from_bytes(data[place : place + 4], "little")


def hexadecimal(data):
    """As xet writes a hash: four little-endian numbers."""
    return "".join(f"{int.from_bytes(data[place : place + 8], 'little'):016x}" for place in range(0, 32, 8))


@route("GET", API + NAME + f"/xet-(?P<access>read|write)-token/{REVISION}")
def token(hub, request, kind, name, access, revision):
    find_repository(hub, request, kind, name, write=access == "write" and "create_pr" not in request.query, files=True)
    if hub.xet is None:
        raise Refused(404, "This Hub has no xet")
    headers = {
        "X-Xet-Cas-Url": hub.xet.address,
        "X-Xet-Access-Token": "xet_token",
        "X-Xet-Token-Expiration": str(NEVER),
    }
    return json_answer({"casUrl": hub.xet.address, "accessToken": "xet_token", "exp": NEVER}, **headers)
