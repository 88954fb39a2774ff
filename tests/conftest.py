"""Settings of every test: no network, one thread, and what transformers logs as deprecated is an error."""

import atexit
import logging
import os
import shutil
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-")  # remote code is copied there, by each worker

import pytest
import torch

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
torch.set_num_threads(1)  # tiny models; several tests run side by side


class DeprecationsAreErrors(logging.Handler):
    """transformers logs some deprecations instead of warning; pytest.ini turns the warnings into errors."""

    def emit(self, record):
        if "deprecat" in record.getMessage().lower():
            raise AssertionError(record.getMessage())


logging.getLogger("transformers").addHandler(DeprecationsAreErrors())


@pytest.fixture
def run(monkeypatch, capsys):
    """Call the program with arguments: its exit code, standard output and standard error."""
    from llava_norm_align import cli  # here, because most tests do without it

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["llava-norm-align", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return call
