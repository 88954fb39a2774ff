"""How the program refuses: one line that says what, where and what to do; exit code 2; nothing written."""

import os
import re
import shutil

from tests.helpers import original
from tests.helpers.convert import tiny_llava
from tests.helpers.parts import write_vision
from tests.helpers.safety import pickle_weights

ADVICE = (
    "check|choose|convert|correct|crop|download|give yourself|install|leave|load|log in|make|merge|name|omit|pass|"
    "pip install|put|remove|repair|run|save|set|use|wait|write"
)
REMEDY = re.compile(rf"[.:;,] (?i:(?:or )?({ADVICE}))\b")  # at the start of a sentence or part of one


def build(root):
    """A sound folder of every kind, and parts for them."""
    tiny_llava(root / "safetensors")
    tiny_llava(root / "shards", shards=2)
    pickle_weights(shutil.copytree(root / "safetensors", root / "bin"))
    original.build(root / "parts", layout="bin")
    shutil.move(root / "parts" / "model", root / "original")
    write_vision(root / "parts" / "siglip", "siglip")
    return root


def lay_traps(folder, monkeypatch):
    """Things that are no model, beside the source that a test puts at folder/source; folder/work is worked in."""
    for name in ("empty", "filled", "work"):
        (folder / name).mkdir()
    (folder / "filled" / "mine.txt").write_text("x")
    (folder / "link").symlink_to(folder / "source")
    (folder / "text.png").write_text("not an image")
    monkeypatch.chdir(folder / "work")


def check_refused(line, message, folder, parts, run):
    """`run` the program with the words of `line`, whose {names} stand for paths, and check how it refuses them."""
    places = {"root": folder, "source": folder / "source", "parts": parts, "long": "x" * 241}
    arguments = [word.format(**places) for word in line.split()]
    before = state(folder)
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("Error: ") and err.count("\n") == 1, err
    assert re.search(message, err), err
    named = [word for word in arguments[1:] if not word.startswith("-") and word in err]
    assert named or str(folder) in err or re.search(r"--[a-z]", err), f"says not where: {err}"
    assert REMEDY.search(err), f"says not what to do: {err}"
    assert ".writing" not in err and "/.source" not in err
    assert state(folder) == before


def state(folder):
    """Every file below `folder`, as far as a write would change it, and every folder."""
    found = {}
    for place, folders, files in os.walk(folder):
        found |= {os.path.join(place, name): None for name in folders}
        paths = [os.path.join(place, name) for name in files]
        found |= {path: (os.lstat(path).st_size, os.lstat(path).st_mtime_ns) for path in paths}
    return found
