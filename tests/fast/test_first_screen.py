"""The first screen: numbers of what was built, checks before the first step, two timed steps, a run left as it is."""

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.trl_recipes import first_screen_facts as facts
from llava_norm_align.trl_recipes import monitor
from llava_norm_align.trl_recipes.first_screen import FirstScreen
from llava_norm_align.trl_recipes.lora import lora_config
from tests.helpers import tiny
from tests.helpers.training import equal, live, norm_aligned, row, rows, trainer

# PEFT 0.21 asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Each takes as long as a tiny training."""
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)


class At(TrainerCallback):
    """Calls `action` with the control at an event."""

    def __init__(self, event, action):
        setattr(self, event, lambda args, state, control, **kwargs: action(control))


def screen(run, **options):
    """A FirstScreen on `run`, whose lines are in `.lines`."""
    lines = []
    made = FirstScreen(run, lambda words: lines.extend(words.split("\n")), **options)
    made.lines = lines
    run.add_callback(made)
    return made


def found(lines, label):
    """The text of a labelled line with what is wrapped under it."""
    start = next(number for number, line in enumerate(lines) if line.startswith(label.ljust(10)))
    rest = [line for line in lines[start + 1 :]]
    end = next((n for n, line in enumerate(rest) if not line.startswith(" " * 10)), len(rest))
    return " ".join(line[10:].strip() for line in lines[start : start + 1 + end])


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


FIELDS = dict(
    max_steps=4, save_steps=2, warmup_steps=2, gradient_accumulation_steps=2, lr_scheduler_type="cosine",
    norm_learning_rate=1e-3, projector_learning_rate=2e-3, weight_decay=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("screen")


@pytest.fixture(scope="module")
def whole(folder):
    """A run with a screen, which reads its first checkpoint back in a fresh process."""
    run = trainer(norm_aligned(dropout=0.1), folder / "with", **FIELDS)
    made = screen(run, notes=["the fp16 checkpoint is loaded in bfloat16"])
    run.train()
    made.end = torch.get_rng_state()
    return made


def test_what_is_told_is_what_was_built(whole):
    result, model = whole.result, norm_aligned()
    assert result["class"] == "LlavaNormAlignForConditionalGeneration"
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    rates = {entry["part"]: entry.get("learning_rate") for entry in result["groups"]}
    assert rates == {"llm": 1e-2, "projector": 2e-3, "norm": 1e-3, "vision": None}  # in the peak, not of the warm-up
    assert result["norm"] == {
        "type": "layer_norm",
        "gain": pytest.approx(model.model.multi_modal_projector.align_norm.weight.abs().mean().item()),
        "gwc": True,
        "floor": 1e-3,
    }
    assert result["batch"] == {"per_device": 2, "accumulated": 2, "total": 4, "rows": 6}
    assert result["schedule"] == {"name": "cosine", "steps": 4, "warm_up": 2}
    assert (result["optimizer"]["name"], result["optimizer"]["eps"]) == ("AdamW", 1e-8)
    assert result["clipping"] == {"kind": "off"} and result["lora"] is None
    assert (result["processes"], result["mixed_precision"], result["checkpointing"]) == (1, "no", False)
    assert result["tower_without_grad"] is True


def test_the_lines_fit_and_say_it(whole):
    assert max(map(len, whole.lines)) <= 100 and all(line.isprintable() for line in whole.lines)
    assert found(whole.lines, "note") == "the fp16 checkpoint is loaded in bfloat16"
    assert found(whole.lines, "batch") == "4 rows a step = 2 per device x 1 process x 2 accumulated"
    assert found(whole.lines, "steps") == "4 steps = 2.00 epochs of 6 rows"
    assert "cosine schedule, warm-up 2 steps" in found(whole.lines, "optimizer")
    assert "AdamW divides away again" in found(whole.lines, "clipping")
    table = [line.split() for line in whole.lines if line.startswith(("norm ", "vision ")) and "float32" in line]
    assert table == [["norm", "64", "float32", "0.001", "0"], ["vision", "16,240", "float32", "frozen"]]


def test_the_first_row_with_its_supervised_tokens(whole):
    # row 0 of the data, not of the shuffled loader; 4 patches of 14 px in 28 px
    assert found(whole.lines, "first row") == "USER: <image> x 4 what is in the picture ?[[ cat </s>]]"
    batch = whole.result["first_batch"]
    assert batch["supervised"] == [2, 3] and batch["image_tokens"] == [4, 4] and batch["image_labels"] == [0, 0]
    assert batch["tokens"] == [13, 14]
    assert found(whole.lines, "labels").startswith("2 to 3 supervised of 13 to 14 tokens a row, 0 image tokens in")


def test_the_checkpoint_was_read_back(whole, folder):
    saved = found(whole.lines, "saved")
    assert saved.startswith(f"{folder / 'with' / 'checkpoint-0'}; reloaded: ok, the model loads in a fresh process")


def test_two_steps_are_timed(whole):
    # an epoch, of six rows of 9 words, 4 image tokens less one, an answer of 1, 2, 1, 3, 1, 2 words and its end
    assert sum(step["tokens"] for step in whole.result["timed"]) == 6 * (7 + 4 + 1) + 10
    assert whole.result["estimate"]["steps"] == 4
    assert sum(line.startswith("time ") for line in whole.lines) == 1
    (peak,) = whole.result["memory"]
    assert 2**27 < peak["peak"] < peak["total"]


def test_a_run_is_the_same_without_it(whole, folder):
    alone = trainer(norm_aligned(dropout=0.1), folder / "without", **FIELDS)
    alone.train()
    assert losses(whole.trainer) == losses(alone) and len(losses(alone)) == 4
    assert equal(live(whole.trainer.model), live(alone.model))
    assert torch.equal(whole.end, torch.get_rng_state())


def test_a_resumed_run_is_the_same_too(whole, folder):
    resumed = trainer(norm_aligned(dropout=0.1), shutil.copytree(folder / "with", folder / "resumed"), **FIELDS)
    made = screen(resumed)
    resumed.train(resume_from_checkpoint=str(folder / "resumed/checkpoint-2"))
    assert losses(resumed) == losses(whole.trainer)
    assert equal(live(resumed.model), live(whole.trainer.model))
    assert torch.equal(whole.end, torch.get_rng_state())
    assert found(made.lines, "steps").endswith("of 6 rows; resumed after step 2")
    assert found(made.lines, "saved").startswith("no checkpoint before the first step")
    assert made.result["estimate"]["steps"] == 2 and len(made.result["timed"]) == 2
    assert found(made.lines, "time").startswith("step 3: ")


def test_a_dry_run_of_an_adapter_stops_after_two_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norm_aligned().save_pretrained("base")
    model = type(norm_aligned()).from_pretrained("base")  # a relative name, which the adapter keeps
    run = trainer(
        model, "out", peft_config=lora_config(model, rank=4, alpha=8), max_steps=6, save_steps=2, eval_steps=2,
        eval_dataset=rows(2), eval_strategy="steps", max_grad_norm=1.0, activation_checkpointing=True,
    )  # fmt: skip
    made = screen(run, dry_run=True)
    run.train()
    assert run.state.global_step == 2
    assert [path.name for path in Path("out").glob("*checkpoint-*")] == ["checkpoint-0"]
    assert not any("eval_loss" in entry for entry in run.state.log_history)
    assert made.lines[-1] == "dry run   stopped after step 2; nothing is kept"
    assert made.result["estimate"]["steps"] == 6
    assert "the adapter loads on its base in a fresh process" in found(made.lines, "saved")
    layers = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert found(made.lines, "lora") == f"rank 4 on 14 layers: {layers}"
    assert "activation checkpointing on" in found(made.lines, "precision")
    assert "can take most of the global norm" in found(made.lines, "clipping")


# Before the first step


def refused(run, error, match):
    before = live(run.model)
    with pytest.raises(error, match=match):
        run.train()
    assert run.state.global_step == 0 and equal(live(run.model), before)


def test_a_checkpoint_that_does_not_load_ends_the_run(tmp_path):
    def damage(control):
        file = tmp_path / "checkpoint-0/model.safetensors"
        tensors = load_file(file)
        del tensors[next(name for name in tensors if name.endswith("linear_2.bias"))]
        save_file(tensors, file, metadata={"format": "pt"})

    run = trainer(norm_aligned(), tmp_path)
    run.add_callback(At("on_train_begin", damage))
    screen(run)
    refused(run, CheckFailed, "checkpoint-0 was written, but it does not load again.*1 missing")


def test_an_adapter_without_a_base_ends_the_run(tmp_path):
    model = norm_aligned()  # from no folder
    run = trainer(model, tmp_path, peft_config=lora_config(model, rank=4, alpha=8))
    screen(run)
    refused(run, CheckFailed, "adapter_config.json names no base model")


def test_image_tokens_in_the_labels_end_the_run(tmp_path):
    """TRL's collator supervises all of `messages`."""
    turns = [
        {"role": "user", "content": "what is in the picture ?"},
        {"role": "assistant", "content": "a cat"},
    ]
    data = Dataset.from_list([{"messages": turns, "images": [tiny.photo(number)]} for number in range(4)])
    run = trainer(norm_aligned(), tmp_path, data=data, save_strategy="no")
    made = screen(run)
    refused(run, InputError, "Row 0 of the data has 4 image tokens in its labels")
    assert "8 image tokens in labels" in found(made.lines, "labels")  # of two rows
    assert "[[<image> x 4]]" in found(made.lines, "first row")


def test_a_row_without_supervised_tokens_ends_the_run(tmp_path):
    data = Dataset.from_list([row(0, image=False), row(1, image=False)])
    run = trainer(norm_aligned(), tmp_path, data=data, max_length=4, save_strategy="no")  # TRL cuts the answers
    screen(run)
    refused(run, InputError, "Row 0 of the data has no supervised token among its 4")


def test_a_projector_alone_is_saved_and_read_back(tmp_path):
    run = trainer(norm_aligned(), tmp_path, trained_parts=["projector", "norm"], save_projector_only=True)
    made = screen(run)
    run.train()
    assert not (tmp_path / "checkpoint-0/model.safetensors").exists()
    assert "6 tensors of the projector bit for bit" in found(made.lines, "saved")


# Steps


def timed(run, clock, **options):
    """A screen whose clock shows `clock`, one time after the other; a further look is an error."""
    made, times = screen(run, **options), iter(clock)
    made._now = lambda: next(times)
    return made


@pytest.mark.parametrize(
    ("ends", "a_step", "words"),
    [
        # begin, end of step 1, begin, end of step 2
        ((0, 10, 11, 13), 2.0, "step 1: 10.00 s, .*step 2: 2.00 s, .* 3,600 steps in about 2.0 hours .* warm-up"),
        ((0, 3, 3, 5), 2.5, "3,600 steps in about 2.5 hours at 2.50 s a step$"),
    ],
)
def test_the_estimate(tmp_path, ends, a_step, words):
    run = trainer(norm_aligned(), tmp_path, save_strategy="no", max_steps=3600)
    run.add_callback(
        At("on_step_end", lambda control: setattr(control, "should_training_stop", run.state.global_step > 3))
    )
    made = timed(run, ends)
    run.train()
    assert run.state.global_step == 4  # two steps after the last look at the clock
    assert made.result["estimate"]["seconds_per_step"] == a_step
    assert made.result["estimate"]["hours"] == pytest.approx(a_step)
    assert re.search(words, found(made.lines, "time"))


@pytest.mark.parametrize("kind", ["evaluation", "save"])
def test_what_is_done_between_steps_is_not_a_steps_time(tmp_path, kind):
    evaluated = dict(save_strategy="no", eval_dataset=rows(2), eval_strategy="steps", eval_steps=1)
    saved = dict(save_steps=1, trained_parts=["projector", "norm"], save_projector_only=True)
    run = trainer(norm_aligned(), tmp_path, max_steps=2, **(evaluated if kind == "evaluation" else saved))
    made = timed(run, (0, 1, 2, 50, 51))  # it ends at 50
    run.train()
    assert [step["seconds"] for step in made.result["timed"]] == [1, 1]


def test_a_run_of_one_step_is_estimated_from_it(tmp_path):
    run = trainer(norm_aligned(), tmp_path, save_strategy="no", max_steps=1, trained_parts=["vision"])
    made = timed(run, (0, 4))
    run.train()
    assert found(made.lines, "time").endswith("1 step in about 4.00 s at 4.00 s a step")
    assert made.result["tower_without_grad"] is False  # it is trained


def test_a_run_that_ends_early_is_not_estimated(tmp_path):
    run = trainer(norm_aligned(), tmp_path, save_strategy="no", max_steps=5)
    run.add_callback(At("on_step_end", lambda control: setattr(control, "should_training_stop", True)))
    made = screen(run)
    run.train()
    assert "estimate" not in made.result and not any(line.startswith(("time", "memory")) for line in made.lines)


def test_the_disk_that_checkpoints_need(tmp_path, monkeypatch):
    run = trainer(
        norm_aligned(), tmp_path, trained_parts=["norm"], save_strategy="no", max_steps=9, save_total_limit=3
    )
    made = screen(run)
    run.train()
    finished = 4 * sum(parameter.numel() for parameter in run.model.parameters())
    free = shutil.disk_usage(tmp_path).free
    assert made.result["disk"]["needed"] == finished and made.result["disk"]["checkpoints"] == 0
    (tmp_path / "checkpoint-0/norm_align").mkdir(parents=True)
    (tmp_path / "checkpoint-0/norm_align/x").write_bytes(bytes(300))
    (tmp_path / "checkpoint-0/y").write_bytes(bytes(700))
    run.args.save_strategy, run.state.save_steps = "steps", 2
    disk = facts.disk_needed(run, made.result["groups"])
    # 0, 2, 4, 6, 8, 9, of which three are kept while a fourth is written; Adam has two float32 for each of 64 weights
    assert (disk["checkpoints"], disk["checkpoint"]) == (4, 1000 + 8 * 64)
    assert disk["needed"] == 4 * 1512 + finished
    assert disk["available"] == pytest.approx(free + 1000, abs=2**24)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/x").write_bytes(bytes(5000))  # with the state of the optimizer
    assert facts.disk_needed(run, made.result["groups"])["checkpoint"] == 5000
    monkeypatch.setattr(run.args, "save_total_limit", None)
    assert facts.disk_needed(run, made.result["groups"])["checkpoints"] == 6
