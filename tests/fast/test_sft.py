"""train as a program: what it writes, what it goes on with, what it refuses before or after the weights are read."""

import errno
import json
import os
import shutil

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoProcessor, LlamaConfig

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import load_model
from llava_norm_align.trl_recipes import first_screen, monitor, sft
from tests.helpers import data_file, tiny
from tests.helpers.training import equal, norm_aligned, row

MARKED = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% else %}{% generation %}{{ message['content'][0]['text'] }} </s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# PEFT 0.21 asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
FIELDS = dict(bf16=False, learning_rate=0.01, per_device_train_batch_size=2, logging_steps=1, report_to="none", seed=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Without pictures, and without the fresh process that reads a checkpoint back, which has tests of its own."""
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)
    monkeypatch.setattr(first_screen, "reload_checkpoint", lambda folder, projector: {"folder": folder, "how": ""})
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "aligned", norm_aligned())


def write_model(folder, network):
    network.save_pretrained(folder)
    processor = tiny.processor()
    processor.chat_template = MARKED
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = data_file.sound_rows(folder / "images", 12)
    data_file.write(folder, rows)
    return folder


def train(model, data, out, *options, said=None, **fields):
    fields = {"model_name_or_path": model, "output_dir": out, "max_steps": 2, **FIELDS, **fields}
    if data is not None:
        fields |= {"data_path": data / "data.json", "image_folder": data / "images"}
    recipe = out.with_suffix(".yaml")
    recipe.write_text("\n".join(f"{name}: {json.dumps(value, default=str)}" for name, value in fields.items()))
    return sft.run([str(recipe), *options], (lambda line: None) if said is None else said.append)


def weights(folder):
    return load_file(folder / "model.safetensors")


def result_of(folder):
    return json.loads((folder / "norm_align/training.json").read_text())


def test_a_dry_run_leaves_nothing(tmp_path, model, data):
    said = []
    train(model, data, tmp_path / "out", "--dry_run", max_steps=50, said=said)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".dry*"))
    text = " ".join(" ".join(said).split())
    for said in ("14 rows, 0 bad: check-data", "step 2: ", " 50 steps", "stopped after step 2"):
        assert said in text


@pytest.mark.parametrize("only", [True, False])
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path, model, data, only):
    fields = dict(trained_parts=["projector", "norm"], save_projector_only=only, save_steps=2)
    whole = train(model, data, tmp_path / "whole", max_steps=4, **fields)
    train(model, data, tmp_path / "cut", max_steps=4, **fields)
    for path in (tmp_path / "cut").iterdir():
        if path.name not in ("checkpoint-0", "checkpoint-2"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (tmp_path / "cut/checkpoint-2/model.safetensors").exists() == (not only)
    assert (tmp_path / "cut/checkpoint-2/projector.safetensors").exists() == only
    again = train(model, data, tmp_path / "cut", "--resume", max_steps=4, **fields)
    assert equal(weights(whole), weights(again))
    losses = [[entry["loss"] for entry in result_of(out)["history"] if "loss" in entry] for out in (whole, again)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def test_the_projector_of_stage_1_goes_into_stage_2(tmp_path, model, data):
    pairs = json.loads((data / "data.json").read_text())
    pairs = [entry for entry in pairs if "image" in entry and len(entry["conversations"]) == 2]
    (tmp_path / "images").symlink_to(data / "images")
    data_file.write(tmp_path, pairs)
    first = train(
        model, tmp_path, tmp_path / "one", prompt_format="plain", trained_parts=["projector", "norm"], max_steps=3
    )
    trained = load_file(first / "projector.safetensors")
    started = {}
    for name in ("with", "without"):
        projector = {"projector": first / "projector.safetensors"} if name == "with" else {}
        second = train(model, data, tmp_path / name, max_steps=1, **projector)
        stored = weights(second / "checkpoint-0")
        started[name] = {key: stored[f"model.{key}"] if f"model.{key}" in stored else stored[key] for key in trained}
    assert all(torch.equal(started["with"][key], value) for key, value in trained.items())
    assert not any(torch.equal(started["without"][key], value) for key, value in trained.items())


def test_a_fresh_projector_is_drawn_from_the_seed(tmp_path, model, data):
    drawn = []
    for number, seed in enumerate((0, 0, 1)):
        out = train(model, data, tmp_path / str(number), max_steps=1, fresh_projector=True, seed=seed)
        drawn.append(weights(out / "checkpoint-0"))
    name = next(key for key in drawn[0] if key.endswith("linear_1.weight"))
    assert torch.equal(drawn[0][name], drawn[1][name]) and not torch.equal(drawn[0][name], drawn[2][name])
    assert drawn[0][name].std().item() == pytest.approx(0.02, rel=0.1)  # LlamaConfig's initializer_range
    assert LlamaConfig().initializer_range == 0.02
    bias, gain = (next(key for key in drawn[0] if key.endswith(end)) for end in ("linear_2.bias", "align_norm.weight"))
    assert not drawn[0][bias].any()
    assert torch.equal(drawn[0][gain], weights(model)[gain])


def test_float16_is_read_as_bfloat16_and_said(tmp_path, data):
    stored = write_model(tmp_path / "half", norm_aligned().half())
    config = json.loads((stored / "config.json").read_text())
    assert config["dtype"] == "float16"
    said = []
    out = train(stored, data, tmp_path / "out", bf16=True, trained_parts=["projector", "norm"], said=said)
    assert any("the checkpoint is float16" in line for line in said)
    dtypes = {key: tensor.dtype for key, tensor in weights(out).items()}
    norms = {key for key in dtypes if "align_norm" in key}
    assert len(norms) == 2 and all(dtypes[key] == torch.float32 for key in norms)
    assert all(dtype == torch.bfloat16 for key, dtype in dtypes.items() if key not in norms)
    assert load_model(out).dtype == torch.bfloat16


def test_images_are_padded_and_the_processor_is_saved_so(tmp_path, model, data):
    out = train(model, data, tmp_path / "out", image_aspect_ratio="pad", max_steps=1)
    for folder in (out, out / "checkpoint-0", out / "checkpoint-1"):
        image_processor = AutoProcessor.from_pretrained(folder).image_processor
        assert image_processor.do_pad is True and type(image_processor).__name__.startswith("LlavaImageProcessor")


def test_a_template_of_ones_own_is_saved_without_its_marks(tmp_path, model, data):
    out = train(model, data, tmp_path / "out", chat_template_path="vicuna_v1", max_steps=1)
    template = AutoProcessor.from_pretrained(out).chat_template
    assert "ASSISTANT" in template and "generation %}" not in template
    assert result_of(out)["recipe"]["chat_template_path"] == "vicuna_v1"


def test_bad_rows_are_refused_or_left_out(tmp_path, model, data):
    shutil.copytree(data, tmp_path / "bad")
    rows = json.loads((data / "data.json").read_text())
    rows[3]["conversations"][1]["value"] = ""
    rows.insert(5, {"id": "x", "conversations": 1})
    data_file.write(tmp_path / "bad", rows)
    with pytest.raises(InputError, match=r"2 of the 15 rows of .* are bad .*row 3 .*--skip_bad_rows true"):
        train(model, tmp_path / "bad", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    said = []
    train(model, tmp_path / "bad", tmp_path / "out", skip_bad_rows=True, num_train_epochs=1, max_steps=-1, said=said)
    assert any("15 rows, 2 bad and left out" in line and "kept verdict" in line for line in said)
    assert result_of(tmp_path / "out")["steps"] == 7  # 13 rows, two at a time


def test_rows_are_grouped_by_what_they_hold(tmp_path, model, data):
    fields = dict(group_by_modality_length=True, max_steps=1, save_strategy="no")
    recipe = tmp_path / "recipe.yaml"
    fields |= {"model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), **FIELDS}
    fields |= {"data_path": str(data / "data.json"), "image_folder": str(data / "images")}
    recipe.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()))
    _, trainer = sft.build(*sft.parse([str(recipe)]), lambda line: None)
    rows = json.loads((data / "data.json").read_text())
    order = list(trainer._get_train_sampler())
    assert sorted(order) == list(range(len(rows)))
    pairs = [["image" in rows[index] for index in order[start : start + 2]] for start in range(0, len(order), 2)]
    assert sum(len(set(pair)) > 1 for pair in pairs) <= 1  # only what is left over of both
    assert len({tuple(pair) for pair in pairs}) > 1


@pytest.mark.parametrize("kind", ["messages", "prompt"])
def test_a_conversational_dataset(tmp_path, model, kind):
    rows = [row(number) for number in range(4)] + [row(4, image=False)]
    if kind == "messages":
        rows = [{"messages": [*r["prompt"], *r["completion"]], "images": r["images"]} for r in rows]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    out = train(
        model, None, tmp_path / "out", dataset_name=tmp_path / "rows.parquet", num_train_epochs=1, max_steps=-1
    )
    assert result_of(out)["steps"] == 3


def test_output_dir_is_not_lost(tmp_path, model, data):
    out = train(model, data, tmp_path / "out", max_steps=1)
    before = weights(out)
    with pytest.raises(InputError, match="is not empty. Go on with the training in it"):
        train(model, data, tmp_path / "out", max_steps=1)
    with pytest.raises(InputError, match="bad"):  # what is refused later leaves the old training, too
        bad = tmp_path / "bad"
        shutil.copytree(data, bad)
        data_file.write(bad, [{"id": 1}, *json.loads((data / "data.json").read_text())])
        train(model, bad, tmp_path / "out", "--overwrite", max_steps=1)
    assert equal(before, weights(out))
    train(model, data, tmp_path / "out", "--overwrite", max_steps=1, seed=5)
    assert not equal(before, weights(out))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds no training, so --overwrite does not replace it"):
        train(model, data, tmp_path / "mine", "--overwrite")
    assert (tmp_path / "mine/letter.txt").exists()


def no_llava(folder, data):
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen2_vl"}))
    return {}


def with_file(name, content):
    def prepare(folder, data):
        (folder / name).write_text(content)
        return {"data_path": folder / name, "image_folder": folder}

    return prepare


def columns(folder, data):
    Dataset.from_list([{"messages": row(0)["prompt"] + row(0)["completion"]}]).to_parquet(folder / "rows.parquet")
    return {"data_path": None, "image_folder": None, "dataset_name": folder / "rows.parquet"}


def not_conversational(folder, data):
    Dataset.from_list([{"text": "a", "images": []}]).to_parquet(folder / "rows.parquet")
    return {"data_path": None, "image_folder": None, "dataset_name": folder / "rows.parquet"}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (no_llava, "qwen2_vl is no LLaVA; one of llava, llava_next"),
        (with_file("empty.json", ""), r"empty.json is empty. LLaVA's JSON was expected"),
        (with_file("none.json", "[]"), r"none.json holds an empty list"),
        (columns, "has the columns messages, but none called image or images"),
        (not_conversational, "has the columns text, images, but `messages`"),
        (lambda folder, data: {"data_path": folder / "no.json"}, r"The data file .*no.json is not there"),
        (lambda folder, data: {"image_folder": folder / "nowhere"}, "nowhere"),
        (lambda folder, data: {"max_length": 5}, r"too_long"),
        (lambda folder, data: {"projector": folder / "no.safetensors"}, "no.safetensors"),
        (lambda folder, data: {"chat_template_path": "no.jinja"}, "no chat template file no.jinja"),
        (lambda folder, data: {"prompt_format": "plain"}, "stage_1"),
        (lambda folder, data: {"model_name_or_path": folder / "nothing"}, "There is no folder .*nothing"),
        (lambda folder, data: {"use_peft": True, "lora_target_modules": "all-linear"}, "hit .* of the vision tower"),
        (lambda folder, data: {"resume": True}, "no whole checkpoint in"),
    ],
)
def test_what_is_refused(tmp_path, model, data, prepare, message):
    folder = shutil.copytree(model, tmp_path / "model")
    fields = {"model_name_or_path": folder, "data_path": data / "data.json", "image_folder": data / "images"}
    with pytest.raises(InputError, match=message) as caught:
        train(folder, None, tmp_path / "out", **{**fields, **prepare(folder, data)})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_projector_of_another_model_is_refused_before_training(tmp_path, model, data):
    out = train(model, data, tmp_path / "one", trained_parts=["projector", "norm"], max_steps=1)
    stock = write_model(tmp_path / "stock", tiny.stock_llava())
    with pytest.raises(InputError, match="convert"):  # it has a norm, and the model has none
        train(stock, data, tmp_path / "out", projector=out / "projector.safetensors")
    assert not (tmp_path / "out").exists()


def test_a_finished_training_is_not_trained_on(tmp_path, model, data):
    out = train(model, data, tmp_path / "out", max_steps=2, lr_scheduler_type="constant")
    before = weights(out)
    train(model, data, tmp_path / "out", "--resume", max_steps=2, lr_scheduler_type="constant")
    assert equal(before, weights(out)) and not (out / "checkpoint-3").exists()
    train(model, data, tmp_path / "out", "--resume", max_steps=3, lr_scheduler_type="constant")
    assert not equal(before, weights(out)) and result_of(out)["steps"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.5), ("per_device_train_batch_size", 1), ("seed", 7), ("optim", "sgd"), ("weight_decay", 0.3)],
)
def test_a_training_goes_on_as_it_began(tmp_path, model, data, field, value):
    out = train(model, data, tmp_path / "out", max_steps=1)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=rf"{field} was .* in the training of .*checkpoint-1, but is {value} now"):
        train(model, data, tmp_path / "out", "--resume", **{"max_steps": 3, field: value})
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_overwrite_takes_only_what_a_training_wrote(tmp_path, model, data):
    for name in ("converted", "mine"):  # a model with result files, and a training with a letter beside it
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "norm_align").mkdir()
    (tmp_path / "converted/norm_align/calibration.json").write_text("{}")
    with pytest.raises(InputError, match="holds no training"):
        train(model, data, tmp_path / "converted", "--overwrite")
    assert (tmp_path / "converted/model.safetensors").exists()
    out = train(model, data, tmp_path / "out", max_steps=1, save_strategy="no")
    (out / "letters").mkdir()
    (out / "letters/one.csv").write_text("dear")
    (out / "notes.md").write_text("mine")
    train(model, data, tmp_path / "out", "--overwrite", max_steps=1, save_strategy="no")
    assert (out / "letters/one.csv").exists() and (out / "notes.md").exists() and (out / "model.safetensors").exists()
    with pytest.raises(InputError, match="lies in output_dir .* which --overwrite replaces"):
        train(out, data, tmp_path / "out", "--overwrite", max_steps=1)
    assert (out / "model.safetensors").exists()
    (tmp_path / "link").symlink_to(out)
    train(model, data, tmp_path / "link", "--overwrite", max_steps=1, seed=3)
    assert (out / "checkpoint-1").is_dir() and (tmp_path / "link").is_symlink()


def test_a_token_is_not_written_down(tmp_path, model, data, monkeypatch):
    words = ["train", "stage1", "--hub_token", "hf_SECRET", "--learning_rate", "1", "--wandb-key=hf_SECRET2"]
    monkeypatch.setattr("sys.argv", ["llava-norm-align", *words])
    out = train(model, data, tmp_path / "out", "--hub_token", "hf_SECRET", max_steps=1)
    written = "".join(path.read_text() for path in out.rglob("*.json"))
    assert "hf_SECRET" not in written and "--hub_token ... --learning_rate 1 --wandb-key=..." in written


def test_an_error_of_a_process_that_reads_rows_is_one_line(tmp_path, model):
    rows = [row(number) for number in range(4)]
    rows[2]["completion"][0]["content"] = "<image>"
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(InputError) as caught:
        train(model, None, tmp_path / "out", dataset_name=tmp_path / "rows.parquet", dataloader_num_workers=1)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert "The row that begins 'what is in the picture ?'" in str(caught.value)


def test_a_model_whose_config_names_no_dtype_keeps_its_own(tmp_path, model, data):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    out = train(folder, data, tmp_path / "out", bf16=True, trained_parts=["projector", "norm"])
    before, after = weights(folder), weights(out)
    frozen = {key for key in before if "multi_modal_projector" not in key}
    assert frozen and all(torch.equal(before[key], after[key]) for key in frozen)


def test_a_full_disk_at_the_end_leaves_the_checkpoints(tmp_path, model, data, monkeypatch):
    def full(*arguments, **fields):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("llava_norm_align.trl_recipes.output.save_projector", full)
    with pytest.raises(InputError, match="no room to save"):
        train(model, data, tmp_path / "out", max_steps=1, trained_parts=["projector", "norm"])
    out = tmp_path / "out"
    assert (out / "checkpoint-1/model.safetensors").exists()
    assert not (out / "config.json").exists() and not (out / "tmp-final").exists()
    monkeypatch.undo()
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)
    train(model, data, tmp_path / "out", "--resume", max_steps=1, trained_parts=["projector", "norm"])
    assert equal(weights(out / "checkpoint-1"), weights(out))
