"""A small Hub on the loopback: models and Spaces are created, pushed, listed and downloaded over real HTTP.

It is strict where a release can go wrong: tokens and their roles, private and gated repositories, unknown revisions, a
parent that is no longer the last commit, sha256 and size of large files, files that were not uploaded, front matter of
the card, no token on the address of a large file.
"""

import subprocess
import threading
import time
from contextlib import contextmanager

USER, TOKEN = "me", "hf_write"  # other tokens and users: hub_request.py


@contextmanager
def running(folder, part_size=0, xet=False):
    """A Hub on a free port that keeps large files in `folder`.

    part_size: above so many bytes an LFS upload is in parts. xet: with xet, too; needs hf_xet here and in the client.
    """
    import uvicorn

    from tests.helpers.hub_server import Hub

    hub = Hub(folder, part_size, xet)
    settings = dict(host="127.0.0.1", port=0, http="h11", lifespan="off", log_level="error")
    server = uvicorn.Server(uvicorn.Config(hub, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    hub.address = f"http://127.0.0.1:{port}"
    try:
        yield hub
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def environment(hub, home, **more):
    """Variables for a program that is to use `hub`, which reads them when it imports huggingface_hub."""
    return {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "0" if hub.xet else "1",  # with hf_xet installed, an upload to a Hub without it fails
        "HF_HUB_OFFLINE": "0",
        **more,
    }


def client(hub, home, base, cwd, **more):
    """Arguments of subprocess for a program that is to use the Hub, on top of the variables `base`."""
    base = {name: value for name, value in base.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    return dict(cwd=cwd, env={**base, **environment(hub, home, **more)}, stdin=subprocess.DEVNULL, text=True)


def run(command, hub, home, base, cwd):
    """Run `command` to its end; its standard output."""
    command = [str(part) for part in command]
    done = subprocess.run(command, **client(hub, home, base, cwd), capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
