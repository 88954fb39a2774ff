"""What stands between visitors and the page's functions: errors in one sentence, and no input but what they take."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from gradio.exceptions import Error
from gradio.utils import get_upload_folder

from llava_norm_align.common.loading import out_of_memory
from llava_norm_align.space.limits import Refused, check_picture

NOT_READ = "The request cannot be read; reload the page, then try again."
UPLOADED_ONLY = "Pictures are taken as uploaded files only, not as addresses or paths; upload the file."
NO_MEMORY = "The memory of the device does not suffice for this; ask for a shorter answer, or use a smaller picture."
FAILED = "Something failed on the server, and its log says what; try again."

PLAIN = (str, int, float, type(None))
FILE = {"_type": "gradio.FileData"}  # the "meta" of a file; in a dict without it, Gradio looks for files further in

log = logging.getLogger(__name__)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn every error within into one sentence for the visitor; what was not foreseen goes to the log."""
    try:
        yield
    except Error as error:
        error.print_exception = False  # a visitor's mistake needs no traceback in the log
        raise
    except Refused as error:
        raise gr.Error(str(error), print_exception=False) from None
    except Exception as error:  # whatever it is, a visitor gets no traceback and no path
        if not out_of_memory(error):
            log.exception("A request failed")
            raise gr.Error(FAILED, print_exception=False) from None
    else:
        return
    # outside of the handler, whose traceback would hold the tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise gr.Error(NO_MEMORY, print_exception=False)


class GuardedBlocks(gr.Blocks):
    """Blocks whose inputs fail in one sentence, and whose files are uploaded pictures and nothing else.

    Gradio alone would download an address on the visitor's behalf, whichever input it comes in, and gr.Image try every
    decoder on what it is given.
    """

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        with one_sentence():
            try:
                for block, value in zip(block_fn.inputs, inputs, strict=False):
                    check_value(block, value)
                return await super().preprocess_data(block_fn, inputs, *args, **kwargs)
            except (Error, Refused):
                raise
            except Exception as error:  # in one line: whoever sends it could fill the log with tracebacks
                log.warning("A request could not be read (%s)", type(error).__name__)
                raise Refused(NOT_READ) from None


def check_value(block: gr.blocks.Block, value: Any) -> None:
    """Refused unless `value`, as a client sends it for `block`, is an uploaded picture, or is plain."""
    if isinstance(block, gr.State):  # Gradio takes its own, not the client's
        return
    if isinstance(block, gr.Image) and value is not None:
        check_upload(value, get_upload_folder())
    elif not isinstance(value, int if isinstance(block, gr.Dataset) else PLAIN):
        raise Refused(NOT_READ)


def check_upload(value: Any, folder: str) -> None:
    """Refused unless `value`, as a client sends it, is a picture's file in `folder`, where uploads are kept."""
    if not isinstance(value, dict) or value.get("meta") != FILE:
        raise Refused(UPLOADED_ONLY)
    path = value.get("path")
    if not isinstance(path, str) or not Path(path).resolve().is_relative_to(Path(folder).resolve()):
        raise Refused(UPLOADED_ONLY)
    check_picture(path)
