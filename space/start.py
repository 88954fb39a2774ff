"""Loads the models and serves the page."""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.program import run_program
from llava_norm_align.space.settings import Settings, read_settings

PORT = "GRADIO_SERVER_PORT"


def main() -> None:
    """The program."""
    run_program(lambda: serve(read_settings(sys.argv[1:]), print))


def serve(settings: Settings, echo: Callable[[str], None]) -> None:
    """Serve the page until the process is ended. InputError for models that cannot be shown, or a port in use."""
    started = time.perf_counter()
    free_port(os.environ.get(PORT))  # said now, not when the models are loaded
    uploads = prepare_environment()
    try:
        page = launch(load_desk(settings, echo))
        echo(f"The page is at {page.local_url} ({time.perf_counter() - started:.1f} s). End it with Ctrl-C.")
        page.block_thread()
    finally:
        shutil.rmtree(uploads, ignore_errors=True)


def prepare_environment() -> str:
    """What Gradio reads from the environment when it is imported: no statistics sent, uploads in a folder of ours.

    The folder is returned.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if not os.environ.get(PORT):
        os.environ.pop(PORT, None)  # an empty one is no number to Gradio
    os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="llava-norm-align-")  # for this user alone
    return os.environ["GRADIO_TEMP_DIR"]


def load_desk(settings: Settings, echo: Callable[[str], None]) -> Any:
    """The desk with its models. InputError if a package is missing, or a model cannot be shown."""
    try:
        import gradio  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "gradio", "app", "The page, which takes transformers 5,") from None
    from llava_norm_align.space.desk import Desk
    from llava_norm_align.space.models import load_models

    return Desk(load_models(settings, echo), settings)


def launch(desk: Any) -> Any:
    """Start the server in the background; the page, with its address."""
    from starlette.middleware import Middleware

    from llava_norm_align.space.limits import MAX_BYTES
    from llava_norm_align.space.middleware import Doorkeeper
    from llava_norm_align.space.page import build_page
    from llava_norm_align.space.theme import CSS, theme

    port = free_port(os.environ.get(PORT))
    address = os.environ.get("SPACE_ID") or f"http://127.0.0.1:{port}"  # what gradio_client takes
    page = build_page(desk, address)
    # Not api_open: what has a queue cannot be called past it. What the page calls without a queue still works.
    page.queue(max_size=desk.settings.queue, default_concurrency_limit=4, api_open=False)
    try:
        page.launch(
            server_port=port,
            theme=theme(),
            css=CSS,
            quiet=True,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            run_history=False,
            show_error=False,
            footer_links=["settings"],
            max_file_size=MAX_BYTES,
            prevent_thread_lock=True,
            app_kwargs={"middleware": [Middleware(Doorkeeper)]},
        )
    except OSError as error:
        raise InputError(
            f"The page cannot be served ({error}). Set {PORT} to a port that you may open, or GRADIO_SERVER_NAME "
            "to an address of this machine."
        ) from error
    return page


def free_port(wanted: str | None) -> int:
    """The port `wanted`, or the first free one from 7860 on. InputError if it is in use or no port.

    Nothing must answer there: on some systems, two servers can bind one port without an error.
    """
    if wanted and not (wanted.isdecimal() and 0 < int(wanted) < 2**16):
        raise InputError(f"{PORT} is {wanted!r}, but a number from 1 to 65535 was expected.")
    for port in [int(wanted)] if wanted else range(7860, 7960):
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    taken = f"Port {wanted} is" if wanted else "The ports 7860 to 7959 are"
    raise InputError(f"{taken} in use by another program. Set {PORT} to a free one.")
