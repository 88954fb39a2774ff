"""What the server refuses before Gradio sees it: addresses, routes that the page does not need, large requests."""

import logging
import re
from typing import Any
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import JSONResponse, PlainTextResponse

from llava_norm_align.space.guard import NOT_READ
from llava_norm_align.space.limits import MAX_BYTES

MAX_BODY = 1_000_000  # bytes of a request that uploads nothing; a question with its answers takes far less
ADDRESS = re.compile("/proxy=|/file[=/]https?:")
# They write files, run functions of components, or print to the log. What follows "=" is a file's path.
UNNEEDED = re.compile(
    "^[^=]*/(process_recording|deep_link|component_server|custom_component|stream|run-history|(undo-)?vibe-[^/]*)(/|$)"
)
TOO_LARGE = "The request exceeds the maximum allowed size."  # by these words Gradio answers 413 to an upload

log = logging.getLogger(__name__)


class Doorkeeper:
    """ASGI middleware: 403 for what `refusal` names, 413 for large requests, one line in the log for broken ones."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if sentence := refusal(scope["path"]):
            await PlainTextResponse(sentence, 403)(scope, receive, send)
            return
        started, path = False, scope["path"].rstrip("/")

        async def note(message: dict[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, limited(receive, path.endswith("/upload")), note)
        except Exception as error:  # Gradio's; the server would print a traceback for everyone who asks for nonsense
            if started:
                raise
            if path.endswith("/cancel"):  # two at once: what the second one wants has happened
                await JSONResponse({"success": True})(scope, receive, send)
                return
            log.warning("A request could not be answered (%s)", type(error).__name__)
            await PlainTextResponse(NOT_READ, 500)(scope, receive, send)


def refusal(path: str) -> str | None:
    """Why a request to this path is refused, or None."""
    path = unquote(path).lower()
    if ADDRESS.search(path):
        return "Addresses are not fetched."
    return "This page does not offer that." if UNNEEDED.search(path) else None


def limited(receive: Any, upload: bool) -> Any:
    """`receive`, which ends a request when more than MAX_BODY bytes have come, and MAX_BYTES in an upload."""
    size = 0

    async def count() -> dict[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if upload and size > MAX_BYTES + MAX_BODY:
            raise MultiPartException(TOO_LARGE)  # on which Gradio deletes what it has written
        if not upload and size > MAX_BODY:
            raise HTTPException(413, TOO_LARGE)
        return message

    return count
