"""Two processes over gloo, under DDP and FSDP2, train as one process with the same global batch does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

import trl

from llava_norm_align.trl_recipes import checkpoints
from tests.helpers import lines
from tests.helpers.training import norm_aligned, stored

LAUNCH = {"ddp": "multi_gpu", "fsdp2": "fsdp2"}  # TRL's own files, as they are
CLIP = {"clip_by_group": True, "max_grad_norm": 1.0, "trained_parts": ["projector", "norm", "llm", "vision"]}
RUNS = {
    "plain": {},
    "clipped": {"fields": {**CLIP, "max_steps": 3, "save_strategy": "no"}},
    "mixed": {"data": "mixed", "fields": {"max_steps": 3, "save_steps": 3}},
}


def launch(folder, runs, command):
    """The results of `runs` in each process."""
    folder.mkdir(exist_ok=True)
    request = folder / "request.json"
    request.write_text(json.dumps({name: {"out": str(folder / name), **run} for name, run in runs.items()}))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    environment.pop("HF_MODULES_CACHE", None)  # each process makes its own
    worker = Path(lines.__file__).with_name("distributed_worker.py")
    done = subprocess.run(
        [sys.executable, *command, str(worker), str(request)],
        cwd=lines.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,  # of processes that wait for each other
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("request.*.json"))]


def launch_two(folder, runs, kind, precision):
    file = Path(trl.__path__[0], "accelerate_configs", f"{LAUNCH[kind]}.yaml")
    options = ["--config_file", str(file), "--num_processes", "2", "--main_process_port", "0"]
    return launch(folder, runs, ["-m", "accelerate.commands.launch", *options, "--mixed_precision", precision])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (results,) = launch(folder, RUNS, [])
    return folder, results


@pytest.fixture(scope="module", params=LAUNCH)
def two(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    more = {
        "ended": {"out": str(folder / "ended"), "terminate": [1, 2], "fields": {"save_steps": 100}},
        "plain again": {"out": str(folder / "plain"), "resume": 2},
        "ended again": {"out": str(folder / "ended"), "resume": 2},
    }
    runs = {name: {"out": str(folder / name), **run} for name, run in RUNS.items()} | more
    results = launch_two(folder, runs, request.param, "no")
    assert len(results) == 2
    for result in results[0].values():
        assert (result["processes"], result["sharded"]) == (2, request.param == "fsdp2")
    return folder, results


def column(result, name):
    return [entry[name] for entry in result["history"]]


@pytest.mark.parametrize("run", RUNS)
def test_as_one_process(one, two, run):
    (one_folder, expected), (folder, (found, _)) = one, two
    expected, found = expected[run], found[run]
    assert len(expected["history"]) >= 3
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), abs=1e-4)
    assert column(found, "gain") == pytest.approx(column(expected, "gain"), abs=1e-6)
    assert column(expected, "gain")[0] != column(expected, "gain")[-1]
    names = {name for name in expected["history"][0] if name.startswith("gradient_norm_")}
    assert len(names) == (4 if run == "clipped" else 3)
    for name in names | {"grad_norm", "visual_norm", "text_norm"}:
        assert column(found, name) == pytest.approx(column(expected, name), rel=1e-3), name
    if run == "clipped":  # something was
        assert min(column(expected, "grad_norm")) > 2
        return
    last = f"checkpoint-{len(expected['history'])}"
    one_weights, weights = stored(one_folder / run / last), stored(folder / run / last)
    assert weights.keys() == one_weights.keys()
    start = stored(one_folder / run / "checkpoint-0")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, one_weights[name], atol=1e-4, rtol=0, msg=name)
    moved = {name for name, tensor in one_weights.items() if not torch.equal(tensor, start[name])}
    assert {name for name in weights if "multi_modal_projector" in name} < moved


def test_resumed_with_the_same_losses(two):
    _, results = two
    for result in results:
        whole = result["plain"]["history"]
        assert [entry["step"] for entry in result["plain again"]["history"]] == [1, 2, 3, 4]
        assert column(result["plain again"], "loss") == pytest.approx([entry["loss"] for entry in whole], abs=1e-6)
        assert column(result["plain again"], "gain") == pytest.approx([entry["gain"] for entry in whole], abs=1e-7)


def test_sigterm_to_one_process_ends_both(two):
    folder, results = two
    for result in results:
        assert result["ended"]["code"] == 143
        assert len(result["ended"]["history"]) == 2
        assert column(result["ended again"], "loss") == pytest.approx(column(result["plain"], "loss"), abs=1e-6)
    checkpoints.check_whole(folder / "ended" / "checkpoint-2")


@pytest.mark.parametrize("line", ["4", "5"])
def test_a_checkpoint_loads_alone(one, two, tmp_path, line):
    folders = [folder / "plain" / "checkpoint-4" for folder, _ in (one, two)]
    tasks = [
        {"do": "read", "folder": str(folder), "kind": "llava", "out": str(tmp_path / f"{number}.pt")}
        for number, folder in enumerate(folders)
    ]
    for result in lines.run_alone(tasks, tmp_path, lines.PYTHONS[line]):
        assert (result["missing"], result["unexpected"]) == ([], [])
        assert result["norm_dtype"] == "torch.float32"
    expected, found = (torch.load(tmp_path / f"{number}.pt")["logits"] for number in range(2))
    assert torch.allclose(found, expected, atol=1e-3)


def test_fsdp2_in_bf16_keeps_the_norm_in_float32(tmp_path):
    runs = {
        "all": {"dtype": "bfloat16", "fields": {"bf16": True}},
        "projector": {"dtype": "bfloat16", "fields": {"bf16": True, "trained_parts": ["projector", "norm"]}},
    }
    for result in launch_two(tmp_path, runs, "fsdp2", "bf16"):
        for run in result.values():
            assert (run["sharded"], run["computed"]) == (True, ["torch.float32"])
    for name in runs:
        before, after = (stored(tmp_path / name / f"checkpoint-{step}") for step in (0, 4))
        gain = "multi_modal_projector.align_norm.weight"
        assert before[gain].dtype == after[gain].dtype == torch.float32
        start = (
            norm_aligned().model.multi_modal_projector.align_norm.weight.bfloat16()
        )  # the worker's model is bfloat16
        assert torch.equal(before[gain], start.float())
        assert not torch.equal(after[gain], after[gain].bfloat16().float())  # nothing rounded it on the way
