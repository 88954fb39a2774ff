"""The errors that end a command: one message that says what was found, where, what was expected, what to do."""


class NormAlignError(Exception):
    """Base class. `exit_code` is what the command line ends with."""

    exit_code = 2


class InputError(NormAlignError):
    """Bad input or usage (exit code 2). Nothing was written."""


class CheckFailed(NormAlignError):
    """The input was good, but a check of the result failed (exit code 1). Nothing was written."""

    exit_code = 1


def missing_extra(module: str, extra: str, purpose: str) -> InputError:
    """The one sentence for an optional dependency that is not installed."""
    return InputError(f"{purpose} needs {module}, which is not installed: pip install 'llava-norm-align[{extra}]'.")
