"""What stands between visitors and Gradio: errors in one sentence, and no requests on a visitor's behalf."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gradio as gr
import torch
from gradio.exceptions import Error
from gradio.utils import get_upload_folder

from llava_norm_align.common.loading import out_of_memory
from llava_norm_align.space.limits import Refused, picture_size

NOT_READ = "The request cannot be read; reload the page, then try again."
UPLOADED_ONLY = "Pictures are taken as uploaded files only, not as addresses or paths; upload the file."
NO_MEMORY = "The memory of the device does not suffice for this; lower the most tokens, or use a smaller picture."
FAILED = "Something failed on the server, and its log says what; try again."

log = logging.getLogger(__name__)


@contextmanager
def one_sentence(unforeseen: str = FAILED) -> Iterator[None]:
    """Turn every error within into one sentence for the visitor; what was not foreseen goes to the log."""
    try:
        yield
    except Error:
        raise
    except Refused as error:
        raise gr.Error(str(error), print_exception=False) from None
    except Exception as error:  # whatever it is, a visitor gets no traceback and no path
        if not out_of_memory(error):
            log.exception("A request failed")
            raise gr.Error(unforeseen, print_exception=False) from None
    else:
        return
    # outside of the handler, whose traceback would hold the tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise gr.Error(NO_MEMORY, print_exception=False)


class GuardedBlocks(gr.Blocks):
    """Blocks whose inputs fail in one sentence, and whose pictures are uploaded files and nothing else.

    gr.Image alone would download an address on the visitor's behalf, and try every decoder on what it is given.
    """

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        with one_sentence(NOT_READ):
            for block, value in zip(block_fn.inputs, inputs, strict=False):
                if isinstance(block, gr.Image) and value is not None:
                    check_upload(value, get_upload_folder())
            return await super().preprocess_data(block_fn, inputs, *args, **kwargs)


def check_upload(value: Any, folder: str) -> None:
    """Refused unless `value`, as a client sends it, is a picture's file in `folder`, where uploads are kept."""
    path = value.get("path") if isinstance(value, dict) else None
    if not isinstance(path, str) or not Path(path).resolve().is_relative_to(Path(folder).resolve()):
        raise Refused(UPLOADED_ONLY)
    picture_size(path)


class NoAddresses:
    """ASGI middleware: 403 for Gradio's routes that fetch an address of the visitor's choice (file=, proxy=)."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and fetches_address(scope["path"]):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Addresses are not fetched."})
            return
        await self.app(scope, receive, send)


def fetches_address(path: str) -> bool:
    """Whether a request's path asks Gradio for what lies at an address."""
    path = unquote(path).lower()
    return "/proxy=" in path or any(f"/file{sign}{kind}:" in path for sign in "=/" for kind in ("http", "https"))
