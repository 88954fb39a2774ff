"""Resume: stock Trainer's fault with LLaVAs, and that ours goes on from exactly the weights of the checkpoint."""

import json
import logging
import os
import resource
import shutil
import signal

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, TrainerCallback
from trl import SFTConfig, SFTTrainer

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes import checkpoints, monitor
from tests.helpers import tiny
from tests.helpers.training import equal, live, norm_aligned, rows, stored, trainer


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Each takes as long as a tiny training."""
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)


class Killed(BaseException):
    """Ends a run as a kill does: nothing in the program handles it."""


class At(TrainerCallback):
    """Calls `action` at an event of the step `step`."""

    def __init__(self, event, action, step=None):
        self.action, self.step = action, step
        setattr(self, event, self.call)

    def call(self, args, state, control, **kwargs):
        if self.step in (None, state.global_step):
            self.action(**kwargs)


def kill(**kwargs):
    raise Killed


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_the_stock_trainer_resumes_a_llava_with_none_of_its_weights(tmp_path, caplog):
    options = dict(cls=SFTTrainer, config=SFTConfig, save_steps=1)
    first = trainer(tiny.stock_llava(), tmp_path, max_steps=1, **options)
    first.train()
    assert not equal(live(first.model), live(tiny.stock_llava()))
    found = {}
    look = At("on_train_begin", lambda model, **_: found.update(live(model)))
    resumed = trainer(tiny.stock_llava(), tmp_path, [look], max_steps=2, **options)
    with caplog.at_level(logging.WARNING, "transformers"):
        resumed.train(resume_from_checkpoint=True)
    assert "There were missing keys" in caplog.text
    assert equal(found, live(tiny.stock_llava()))  # the base's, not the checkpoint's


@pytest.mark.parametrize("make", [norm_aligned, lambda: tiny.stock_llava("siglip", "qwen2", tied=True)])
def test_ours_resumes_with_the_weights_of_the_checkpoint(tmp_path, make):
    trainer(make(), tmp_path, save_steps=1).train()
    found = {}
    look = At("on_train_begin", lambda model, **_: found.update(live(model)))
    trainer(make(), tmp_path, [look], max_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    saved = stored(tmp_path / "checkpoint-2")
    head, table = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    if head not in saved:  # tied
        assert torch.equal(found.pop(head), found[table])
    assert equal(found, saved)
    assert not equal(saved, stored(tmp_path / "checkpoint-0"))


def in_bf16():
    model = norm_aligned(dropout=0.1).bfloat16()
    model.model.multi_modal_projector.float()  # two dtypes beside the norm's
    return model


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: norm_aligned(dropout=0.1), dict(save_steps=2, gradient_accumulation_steps=2, max_grad_norm=1.0)),
        (in_bf16, dict(save_steps=3, bf16=True, activation_checkpointing=True)),  # steps 3 and 6 end an epoch
    ],
    ids=["accumulated", "bf16"],
)
def test_killed_and_resumed_is_the_same_as_not_killed(tmp_path, caplog, monkeypatch, make, fields):
    whole = trainer(make(), tmp_path / "whole", max_steps=7, **fields)
    whole.train()
    end = torch.get_rng_state()

    folder = tmp_path / "killed"
    with pytest.raises(Killed):  # before any save but the first
        trainer(make(), folder, [At("on_step_end", kill, 1)], max_steps=7, **fields).train()
    with pytest.raises(Killed):
        run = trainer(make(), folder, [At("on_step_end", kill, 5)], max_steps=7, **fields)
        run.train(resume_from_checkpoint=True)
    with pytest.raises(Killed):  # inside of a save
        run = trainer(make(), folder, max_steps=7, **fields)
        save = run._save_rng_state
        monkeypatch.setattr(run, "_save_rng_state", lambda path: kill() if path.endswith("-6") else save(path))
        run.train(resume_from_checkpoint=True)
    assert (folder / "tmp-checkpoint-6" / "model.safetensors").is_file()
    assert not (folder / "checkpoint-6").exists()
    resumed = trainer(make(), folder, max_steps=7, **fields)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "tmp-checkpoint-6 is ignored" in caplog.text

    assert len(losses(whole)) == 7
    assert losses(resumed) == losses(whole)
    assert [entry.get("num_tokens") for entry in resumed.state.log_history] == [
        entry.get("num_tokens") for entry in whole.state.log_history
    ]
    assert equal(live(resumed.model), live(whole.model))
    assert torch.equal(torch.get_rng_state(), end)
    one, other = (run.optimizer.state_dict()["state"] for run in (resumed, whole))
    assert one.keys() == other.keys() and one
    assert all(equal(one[number], other[number]) for number in one)


def test_sigterm_saves_the_next_step_and_ends_with_143(tmp_path):
    whole = trainer(norm_aligned(), tmp_path / "whole", max_steps=4)
    whole.train()
    handler = signal.getsignal(signal.SIGTERM)
    stop = At("on_step_begin", lambda **_: os.kill(os.getpid(), signal.SIGTERM), 2)
    with pytest.raises(SystemExit) as ended:
        trainer(norm_aligned(), tmp_path / "ended", [stop], max_steps=4, logging_steps=2).train()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert sorted(path.name for path in (tmp_path / "ended").iterdir()) == ["checkpoint-0", "checkpoint-3"]
    resumed = trainer(norm_aligned(), tmp_path / "ended", max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert equal(live(resumed.model), live(whole.model))


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    run = trainer(
        norm_aligned(), tmp_path, eval_dataset=rows(2), eval_strategy="steps", eval_steps=1, save_steps=1, max_steps=3,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    run.train()
    evaluated = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    best = max(evaluated, key=evaluated.get)  # so that it is not the last one
    assert best < 3
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert equal(live(run.model), stored(tmp_path / f"checkpoint-{best}"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer(norm_aligned(), folder, save_steps=1).train()
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copied")


def resume(folder, model=None, **fields):
    return trainer(model or norm_aligned(), folder, max_steps=3, **fields).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("damage", ["weights cut", "no state", "no optimizer"])
def test_a_cut_checkpoint_is_ignored_with_a_sentence(copied, damage, caplog):
    newest = copied / "checkpoint-2"
    if damage == "weights cut":
        os.truncate(newest / "model.safetensors", 50_000)
    else:
        (newest / {"no state": "trainer_state.json", "no optimizer": "optimizer.pt"}[damage]).unlink()
    with caplog.at_level(logging.WARNING, checkpoints.__name__):
        assert checkpoints.last_checkpoint(copied) == copied / "checkpoint-1"
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith(f"{newest} is ignored: ")


def test_no_checkpoint_to_resume_from(tmp_path):
    with pytest.raises(InputError, match="no whole checkpoint in"):
        resume(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(copied):
    other = norm_aligned()
    other.get_input_embeddings().weight.data[0, 0] += 1  # the same shapes
    with pytest.raises(InputError, match="was written by a training of another model"):
        resume(copied, other)
    with pytest.raises(InputError, match="another model"):
        resume(copied, norm_aligned(norm_align_type="rms_norm"))
    (copied / "checkpoint-2/norm_align/start.json").unlink()
    with pytest.raises(InputError, match="holds a llava_norm_align, but a llava is trained"):
        resume(copied, tiny.stock_llava())


@pytest.mark.parametrize("fault", ["missing", "unexpected", "of another shape", "float64"])
def test_weights_that_do_not_fit_are_refused(copied, fault):
    file = copied / "checkpoint-2/model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("linear_2.bias"))
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        tensors["multi_modal_projector.linear_3.bias"] = torch.ones(2)
    elif fault == "of another shape":
        tensors[name] = torch.ones(7)
    else:
        tensors = {key: tensor.double() for key, tensor in tensors.items()}
        tensors[name] += 1e-12
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="does not hold exactly" if fault == "float64" else f"1 {fault}"):
        resume(copied)


def test_a_stock_checkpoint_without_a_tensor_is_refused(tmp_path):
    trainer(tiny.stock_llava(), tmp_path, max_steps=1).train()
    file = tmp_path / "checkpoint-1/model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("linear_2.bias"))]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="cannot be resumed from: .* 1 missing"):
        resume(tmp_path, tiny.stock_llava())


def test_another_choice_of_parts_is_refused(copied):
    with pytest.raises(InputError, match="trained_parts was the default in the training of"):
        resume(copied, trained_parts=["projector", "norm"])


def test_a_model_that_cannot_be_saved_is_not_trained(tmp_path):
    model = norm_aligned()
    model.generation_config.temperature = 0.5  # without do_sample
    with pytest.raises(InputError, match="cannot be saved, so it is not trained"):
        trainer(model, tmp_path).train()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_checkpoints_before_it(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill = At("on_step_end", lambda **_: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1])), 1)
    try:
        with pytest.raises(InputError, match="no room to save a checkpoint"):
            trainer(norm_aligned(), tmp_path, [fill], save_steps=1).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]
    checkpoints.check_whole(tmp_path / "checkpoint-0")


def test_a_checkpoint_holds_code_processor_and_template(trained):
    folder = trained / "checkpoint-1"
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.chat_template == tiny.TEMPLATE
    assert (processor.patch_size, processor.num_additional_image_tokens) == (14, 1)
    assert (folder / "modeling_llava_norm_align.py").is_file()
    assert (folder / "configuration_llava_norm_align.py").is_file()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # 4.57 has no TokenizersBackend
    assert not isinstance(settings.get("extra_special_tokens"), list)
