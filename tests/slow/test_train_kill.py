"""A training killed at random moments, two of them inside a save, ends as one that was not killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from tests.helpers.lines import ROOT
from tests.helpers.training import equal, norm_aligned, stored, trainer

STEPS = 400
KILLS, IN_SAVE = 8, 2


def run(folder, resume):
    """What the child process does."""
    torch.set_num_threads(1)
    model = norm_aligned(dropout=0.1)
    made = trainer(model, folder, max_steps=STEPS, save_steps=3, save_total_limit=3, learning_rate=1e-3)
    made.train(resume_from_checkpoint=resume)


def start(folder):
    resume = any(folder.glob("checkpoint-*"))
    code = (
        f"from pathlib import Path; from tests.slow.test_train_kill import run; run(Path({str(folder)!r}), {resume})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def newest(folder):
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=-1)


def history(folder):
    state = json.loads(Path(folder, "trainer_state.json").read_text())
    return [(entry["step"], entry["loss"]) for entry in state["log_history"] if "loss" in entry]


def test_ten_kills(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(whole)
    assert process.wait() == 0, process.stderr.read().decode()
    generator, cut = random.Random(0), 0
    for number in range(KILLS + IN_SAVE):
        before, process = newest(killed), start(killed)
        while newest(killed) <= before + 3 and process.poll() is None:  # it trains
            time.sleep(0.01)
        if number < KILLS:
            time.sleep(generator.uniform(0, 0.5))
        else:
            while not any(killed.glob("tmp-checkpoint-*/model.safetensors")) and process.poll() is None:
                pass
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read().decode()
        cut += any(killed.glob("tmp-checkpoint-*"))
    assert cut >= IN_SAVE
    process = start(killed)
    assert process.wait() == 0, process.stderr.read().decode()
    last = f"checkpoint-{STEPS}"
    assert len(history(whole / last)) == STEPS
    assert history(killed / last) == history(whole / last)
    assert equal(stored(killed / last), stored(whole / last))
