"""What every program of the package does around its work: logs, signals, errors in one line, exit codes."""

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import transformers

from llava_norm_align.common.errors import NormAlignError


def run_program(work: Callable[[], Any]) -> NoReturn:
    """Run `work` and end the process. Exit code 0: done; 1: a check failed; 2: bad input or usage.

    `--debug` among the arguments shows tracebacks and the libraries' logs.
    """
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(levelname)s: %(message)s")
    if not debug:
        transformers.logging.set_verbosity_error()
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns when PEFT imports it, used or not
        transformers.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that unfinished folders go
    try:
        work()
        code = 0
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        code = 130
    except NormAlignError as error:
        if debug:
            raise
        print(f"Error: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:  # no room, no permission
        if debug:
            raise
        print(f"Error: {in_words(error)}", file=sys.stderr)
        code = 2
    except Exception as error:
        if debug:
            raise
        print(f"Unexpected {type(error).__name__}: {error} (run again with --debug to see where)", file=sys.stderr)
        code = 1
    sys.exit(code)


def in_words(error: OSError) -> str:
    """What the system said, of which file, and what may help."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}. Check the permissions, and that the disk has room and works."
