"""What can go wrong between us and the Hub, each in one sentence that says what the Hub holds now, without secrets."""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_token
from packaging.version import Version

from llava_norm_align.common.errors import InputError, NormAlignError

OLDEST = "1.31"
TRANSIENT = (408, 429, 500, 502, 503, 504)
WAITS = (1, 2, 4, 8)  # seconds, where the Hub does not say how long
UNTOUCHED = "Nothing was created or changed on the Hub."
CHANGED = re.compile("XAmzContentSHA256Mismatch|BadDigest")  # the storage's words for content of another hash
TOKENS = "https://huggingface.co/settings/tokens"


class Remote:
    """`words`: what the Hub holds by now, for whoever reads an error."""

    def __init__(self, words: str = UNTOUCHED) -> None:
        self.words = words


def check_version() -> None:
    """InputError with a huggingface_hub that is too old to prove access before an upload."""
    if Version(huggingface_hub.__version__) < Version(OLDEST):
        raise InputError(
            f"release needs huggingface_hub >= {OLDEST}, and this environment has {huggingface_hub.__version__}, as "
            "transformers 4.57 wants it. Run release in an environment with transformers 5; what it writes loads in "
            "both."
        )


@contextmanager
def hub_errors(api: HfApi, repo_id: str, doing: str, remote: Remote) -> Iterator[None]:
    """Turn what huggingface_hub raises in the block into an InputError; keep secrets out of its log.

    No error has a cause, whose traceback would show addresses of requests.
    """
    with clean_log(api):
        try:
            yield
        except NormAlignError as error:
            raise error from None
        except (KeyboardInterrupt, SystemExit):
            print(remote.words, file=sys.stderr)  # with --json, too, where echo is silent
            raise
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{in_words(error, api, repo_id, doing)} {remote.words}") from None


def patiently(call: Callable[..., Any], *arguments: Any, echo: Callable[[str], Any], **options: Any) -> Any:
    """The result of a call that may be done twice and that huggingface_hub does not repeat itself."""
    for wait in WAITS:
        try:
            return call(*arguments, **options)
        except HTTPError as error:
            if not is_transient(error):
                raise
            pause(error, wait, echo)
    return call(*arguments, **options)


def is_transient(error: Exception) -> bool:
    """No answer at all, or one that says: later."""
    status = status_of(error)
    return status in TRANSIENT or (status is None and isinstance(error, HTTPError))


def status_of(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def pause(error: HTTPError, wait: float, echo: Callable[[str], Any]) -> None:
    """Wait as long as the Hub says, else `wait` seconds."""
    status, asked = status_of(error), _asked_wait(error)
    seconds = wait if asked is None else asked + 1
    said = "did not answer" if status is None else f"answered {status}"
    echo(f"The Hub {said}; trying again in {seconds} s")
    time.sleep(seconds)


def _asked_wait(error: HTTPError) -> int | None:
    """Seconds from the headers of a 429 or 503."""
    from huggingface_hub.utils import parse_ratelimit_headers  # older ones, which get as far as check_version, lack it

    if not isinstance(error, HfHubHTTPError):
        return None
    limit = parse_ratelimit_headers(error.response.headers)
    if status_of(error) == 429 and limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    after = error.response.headers.get("retry-after", "")
    return int(after) if after.isdigit() else None


def in_words(error: Exception, api: HfApi, repo_id: str, doing: str) -> str:
    """What happened while `doing`, and what to do."""
    cause = _root(error)
    hub = f"The Hub at {api.endpoint}"
    if isinstance(cause, LocalTokenNotFoundError):
        return f"{hub} needs a token for {doing}, and there is none. Log in with: hf auth login, or set HF_TOKEN."
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{doing[0].upper()}{doing[1:]} needs the Hub, but HF_HUB_OFFLINE is set. Unset it, and run again."
    if not (_token(api) or "").isascii():
        return "The token has a character that no token has. Log in with: hf auth login --force, or set HF_TOKEN."
    status = status_of(cause) or _xet_status(cause)
    if status is not None:
        return _of_status(status, cause, hub, repo_id, doing, clean(_said(cause), api))
    if isinstance(cause, HTTPError | ConnectionError):
        return (
            f"{hub} could not be reached for {doing} ({type(cause).__name__}: {clean(str(cause), api)}). Check the "
            "connection, HF_ENDPOINT and your proxy, and run again."
        )
    if isinstance(cause, OSError) and cause.filename:
        return f"{cause.filename} cannot be read for {doing} ({cause.strerror}). Check the file, and run again."
    return f"{doing[0].upper()}{doing[1:]} failed: {clean(str(cause), api)}. Mend what it names, and run again."


def _of_status(status: int, cause: Exception, hub: str, repo_id: str, doing: str, said: str) -> str:
    quoted = f": {said}" if said else ""
    refused = f"{hub} refused {doing} ({status}{quoted})."
    if status == 404 and not isinstance(cause, HfHubHTTPError):
        return (
            f"{hub} has no xet storage ({status}), but hf_xet is installed here, so huggingface_hub uploads with it "
            "alone. Set HF_HUB_DISABLE_XET=1, and run again."
        )
    if CHANGED.search(said):
        return f"A file of the folder changed here while it was uploaded ({status}{quoted}). Run again."
    if status == 401:
        return f"{refused} The token is not valid or has ended. Log in with: hf auth login --force, or set HF_TOKEN."
    if status == 402:
        return f"{refused} The account's plan or storage does not allow it. See its billing page, or make room."
    if status == 403:
        return f"{refused} Use a token that may write to {repo_id}: {TOKENS}"
    if isinstance(cause, RevisionNotFoundError):
        return f"{hub} has no such revision of {repo_id} ({status}{quoted}). Name a branch of it with --revision."
    if status == 404:
        return f"{refused} {repo_id} is not there, or the token may not see it. Check the name and the token."
    if status == 409:
        return f"{refused} Something else is changing {repo_id} right now. Look at it, and run again."
    if status == 412:
        return (
            f"Somebody else has committed to {repo_id} since this upload began ({status}). Look at what changed; the "
            "same command then builds on it."
        )
    if status == 429:
        return f"{hub} asks for fewer requests ({status}{quoted}), after several tries. Run again in some minutes."
    if status in TRANSIENT:
        return f"{hub} failed at {doing} ({status}{quoted}), after several tries. Run again later."
    return f"{refused} Mend what it names, and run again."


def _root(error: Exception) -> Exception:
    """huggingface_hub hides the Hub's answer to the upload of a file, or to a download, behind another error."""
    cause = error
    while isinstance(cause, RuntimeError | LocalEntryNotFoundError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    return cause


def _xet_status(error: Exception) -> int | None:
    """hf_xet gives the status of the Hub's answer in the text of a ConnectionError only."""
    found = re.search(r"\((\d{3}) [^)]*\).*/xet-(?:write|read)-token/", str(error))
    return int(found[1]) if found and isinstance(error, ConnectionError) else None


def _said(error: Exception) -> str:
    """The Hub's own words."""
    return (error.server_message or "") if isinstance(error, HfHubHTTPError) else ""


def _token(api: HfApi) -> str | None:
    return api.token if isinstance(api.token, str) else get_token()


def clean(text: str, api: HfApi) -> str:
    """`text` in one line, without tokens and without the signatures in addresses."""
    token = _token(api)
    if token:
        text = text.replace(token, "...")
    text = re.sub(r"\bhf_[A-Za-z0-9]{20,}", "...", text)
    text = re.sub(r"(?i)\bbearer\s+\S+", "Bearer ...", text)
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    return " ".join(text.split()).rstrip(".")


class _Cleaner(logging.Filter):
    """huggingface_hub logs the signed address of each request that it repeats."""

    def __init__(self, api: HfApi) -> None:
        super().__init__()
        self.api = api

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = clean(record.getMessage(), self.api), ()
        return True


@contextmanager
def clean_log(api: HfApi) -> Iterator[None]:
    """A filter of a logger does not see what its children log; one of the handlers does.

    huggingface_hub has a handler of its own, which would print each line a second time where the root has one, too.
    """
    cleaner, library, root = _Cleaner(api), logging.getLogger("huggingface_hub"), logging.getLogger()
    handlers = [*library.handlers, *root.handlers]
    doubled = list(library.handlers) if library.propagate and root.handlers else []
    for handler in handlers:
        handler.addFilter(cleaner)
    for handler in doubled:
        library.removeHandler(handler)
    try:
        yield
    finally:
        for handler in doubled:
            library.addHandler(handler)
        for handler in handlers:
            handler.removeFilter(cleaner)
