"""Conversions in forked children of a warm process: killed at any moment, as another user, on a full disk."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import contextmanager

import torch
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

from llava_norm_align import cli
from llava_norm_align.common.results import sha256_file
from llava_norm_align.conversion.doctor import examine
from tests.helpers.convert import stored_tensors, tiny_config, write_json, write_processor, write_tensors

NOBODY = 65534


def write_llava(folder, hidden, rows, shards=3, pickled=False):
    """A stock LLaVA of about 8 * hidden * rows bytes: fp32 text table and head, and little else."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    config = tiny_config()
    config.text_config.hidden_size, config.text_config.vocab_size = hidden, rows
    tensors = stored_tensors(LlavaForConditionalGeneration(config), "old", folder / "scratch")
    write_tensors(folder, tensors, shards)
    write_json(folder / "config.json", config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]})
    write_processor(folder)
    if pickled:
        pickle_weights(folder)
    return folder


def pickle_weights(folder):
    """Write the safetensors of `folder` as .bin, with an index if there was one."""
    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), folder / pickled_name(file.name))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(content)
        index.unlink()


def pickled_name(name):
    return f"pytorch_{name.removesuffix('.safetensors')}.bin"


def start(arguments, log, prepare=lambda: None):
    """Fork a child that calls `prepare` and runs the program with `arguments`, its output in `log`; returns its id.

    Where a new process imports for seconds, a fork takes milliseconds, so that a kill hits the conversion itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside torch's threads
        child = os.fork()
    if child:
        return child
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, errors="backslashreplace", closefd=False) for number in (1, 2)
        )
        sys.argv = ["llava-norm-align", *map(str, arguments)]
        prepare()
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def finish(child):
    """Wait for a child; its exit code, or minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(arguments, log, prepare=lambda: None):
    """The exit code and the output of the program in a child process."""
    code = finish(start(arguments, log, prepare))
    return code, log.read_text()


def kill_after(seconds, arguments, log):
    """As `run`, with kill -9 after `seconds`, unless the child has ended by then."""
    child = start(arguments, log)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return finish(child)


def digests(folder):
    """{relative path: sha256} of every file below `folder`."""
    return {str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def faults(folder):
    """What the doctor finds wrong."""
    return [check for check in examine(folder, load=False) if check.status == "failed"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def break_off_and_go_on(source, target, seconds, log, number, options=()):
    """Kill a conversion of `source` after `seconds`, check what it leaves, run it again; returns what the kill met.

    If there is a `target`, the run replaces it, with a norm of its own by which the two are told apart.
    """
    sources, old = digests(source), digests(target) if target.exists() else None
    command = ["convert", source, target, "--no-report", "--target", 1 + number, *options]
    command += ["--overwrite"] if old else []
    code = kill_after(seconds, command, log)
    assert code in (0, -signal.SIGKILL), log.read_text()
    writing = target.with_name(f".{target.name}.writing").exists()
    found = digests(target) if target.exists() else None
    if found != old:  # not the state before: then the whole new one
        assert faults(target) == []
    met = "ended" if code == 0 else "new" if found != old else "writing" if writing else "before"

    code, output = run([*command, *(["--overwrite"] if found and not old else [])], log)
    assert code == 0, output
    assert faults(target) == [] and names(target.parent) == [target.name]
    assert digests(source) == sources
    return met


def duration(arguments, log, runs=3):
    """The seconds that the fastest of some runs takes."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        code, output = run(arguments, log)
        seconds.append(time.perf_counter() - began)
        assert code == 0, output
    return min(seconds)


def moments(count, seconds, generator):
    """`count` moments of a run that takes `seconds`: one in each of as many equal parts."""
    return [(part + generator.random()) / count * seconds for part in range(count)]


@contextmanager
def full_disk(folder, size, mount=True):
    """A disk of `size` bytes at `folder`, and what a child must call for it to be full after them.

    A mount needs root; elsewhere a limit on the size of files stands in for it.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    possible = mount and shutil.which("mount")
    mounted = bool(possible) and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield (lambda: None) if mounted else (lambda: limit_files(size // 8))
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def limit_files(size):
    """Let every write beyond `size` bytes of a file fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def become_nobody():
    """Root may read and write everything: be somebody else. Without root, the files' modes are enough."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def run_here(arguments):
    """Run the program in this process, so that children forked afterwards import nothing."""
    before, sys.argv = sys.argv, ["llava-norm-align", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code
    finally:
        sys.argv = before
