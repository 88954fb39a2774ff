"""Recipes and their fields: what is read, what is refused before anything is loaded."""

import re
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("trl")

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes.arguments import (
    RECIPES,
    ScriptArguments,
    check_together,
    find_recipe,
    parse,
    recipe_names,
)
from llava_norm_align.trl_recipes.config import LlavaSFTConfig

NAMES = ["micro_stage1", "micro_stage2", "stage1", "stage2", "stage2_lora", "stage2_qlora"]
MODEL = ["--model_name_or_path", "m", "--data_path", "d.json", "--image_folder", "i"]


def recipe(folder, **fields):
    path = folder / "recipe.yaml"
    fields = {"model_name_or_path": "m", "data_path": "easy-vqa", "output_dir": str(folder / "out"), **fields}
    path.write_text(yaml.safe_dump({name: value for name, value in fields.items() if value is not ...}))
    return str(path)


def test_the_recipes_are_shipped():
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_recipe_says_what_it_is_and_its_default(name):
    """The default stands in parentheses at the end; that of a number or a truth value is compared with the class."""
    for line in (RECIPES / f"{name}.yaml").read_text().splitlines():
        if line.startswith("#"):
            continue
        field, _, comment = re.fullmatch(r"(\w+): (.*?) +# (.*)", line).groups()
        assert comment.endswith(")"), line
        default = re.search(r"\((?:null: )?([^()]*)\)$", comment)[1]
        kind = next(kind for kind in (ScriptArguments, LlavaSFTConfig) if field in kind.__dataclass_fields__)
        known = kind.__dataclass_fields__[field].default
        if re.fullmatch(r"-?[0-9.e-]+", default):
            assert float(default) == known, line
        elif default in ("true", "false"):
            assert known is (default == "true"), line
        elif default == "null" or "(null" in comment:
            assert known is None, line
        elif field in ("prompt_format", "image_aspect_ratio", "output_dir", "lr_scheduler_type"):
            assert default == (getattr(known, "value", known) or "trainer_output"), line


@pytest.mark.parametrize("name", ["micro_stage1", "micro_stage2"])
def test_what_is_for_a_cpu_computes_in_float32(name):
    assert parse([name])[1].bf16 is False


# haotian-liu/LLaVA, scripts/v1_5/{pretrain,finetune,finetune_lora}.sh
@pytest.mark.parametrize(
    ("name", "rate", "batch", "trained"),
    [
        ("stage1", 1e-3, 256, ["projector", "norm"]),
        ("stage2", 2e-5, 128, ["projector", "norm", "llm"]),
        ("stage2_lora", 2e-4, 128, None),
        ("stage2_qlora", 2e-4, 128, None),
    ],
)
def test_the_values_are_llavas(name, rate, batch, trained):
    script, config = parse([name, *MODEL])
    assert config.learning_rate == rate
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == batch
    assert trained is None or config.trained_parts == trained
    assert (config.num_train_epochs, config.lr_scheduler_type, config.warmup_steps) == (1, "cosine", 0.03)
    assert (config.weight_decay, config.max_grad_norm, config.max_length, config.bf16) == (0.0, 0.0, 2048, True)
    assert script.image_aspect_ratio == ("square" if name == "stage1" else "pad")
    assert script.prompt_format == ("plain" if name == "stage1" else "chat")
    assert config.group_by_modality_length == (name != "stage1")
    assert script.use_peft == ("lora" in name) and script.load_in_4bit == ("qlora" in name)
    if script.use_peft:
        assert (script.lora_r, script.lora_alpha, config.projector_learning_rate) == (128, 256, 2e-5)


def test_the_command_line_wins_over_the_recipe(tmp_path):
    path = recipe(tmp_path, learning_rate="1e-4", trained_parts=["norm"], max_length=None, seed=3)
    _, config = parse([path])
    assert (config.learning_rate, config.trained_parts, config.max_length, config.seed) == (1e-4, ["norm"], None, 3)
    script, config = parse(
        [path, "--learning_rate=3e-4", "--trained_parts", "projector", "norm", "--max-length", "9", "--dry_run"]
    )
    assert (config.learning_rate, config.trained_parts, config.max_length) == (3e-4, ["projector", "norm"], 9)
    assert script.dry_run is True


def test_a_file_stands_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("stage1") == RECIPES / "stage1.yaml" == find_recipe("stage1.yaml")
    (tmp_path / "stage1.yaml").write_text("seed: 1")
    assert find_recipe("stage1.yaml").read_text() == "seed: 1"


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"fp16": True}, [], "fp16 is true.*Set bf16: true"),
        ({"learning_rat": 1}, [], r"recipe.yaml has no field 'learning_rat'. The nearest is learning_rate\."),
        ({}, ["--lora_alfa", "8"], r"train has no field 'lora_alfa'. The nearest is lora_alpha\."),
        ({}, ["--max_steps", "many"], "max-steps: invalid int value: 'many'"),
        ({}, ["--max_steps", "3", "4"], "'4' belongs to no field"),
        ({"data_path": ...}, [], "Neither data_path nor dataset_name"),
        ({"dataset_name": "x"}, [], "Both data_path and dataset_name"),
        ({"model_name_or_path": ...}, [], "There is no model to train"),
        ({"data_path": "rows.json"}, [], "rows.json, but the folder of its images is missing. Pass --image_folder"),
        ({"prompt_format": "vicuna"}, [], "prompt_format is 'vicuna'; one of plain, chat"),
        ({"dtype": "float16"}, [], "dtype is 'float16'; one of bfloat16, float32"),
        ({"dtype": "bfloat16", "bf16": False}, [], "dtype is bfloat16, but bf16 is false"),
        ({"load_in_4bit": True}, [], "cannot be trained. Set use_peft"),
        ({"save_projector_only": True}, [], "save_projector_only is true, but projector, norm, llm are trained"),
        ({"save_projector_only": True, "use_peft": True}, [], "but LoRA adapters are trained"),
        ({"projector": "p", "fresh_projector": True}, [], "exclude each other"),
        ({"group_by_modality_length": True, "data_path": ..., "dataset_name": "x"}, [], "only rows of LLaVA's JSON"),
        ({"trained_parts": ["mlp"]}, [], "trained_parts names 'mlp'"),
        ({"clip_by_group": True}, [], "clip_by_group is true, but max_grad_norm is 0"),
        ({}, ["--resume", "--overwrite"], "Leave one out"),
        ({}, ["--resume", "--dry_run"], "Leave one out"),
        ({"max_steps": 0}, [], "max_steps is 0, but 1 or more, or -1"),
        ({"per_device_train_batch_size": 0}, [], "per_device_train_batch_size is 0, but 1 row or more"),
        ({}, ["--learning_rate", "nan"], "learning_rate is nan, but 0 or more"),
        ({"trained_parts": None}, [], "trained_parts names nothing"),
        ({"lora_r": 0}, [], "lora_r is 0"),
        ({"report_to": "wandbb"}, [], "report_to names 'wandbb'"),
        ({"eval_strategy": "epoch"}, [], "no rows to evaluate on"),
        ({"resume_from_checkpoint": "x"}, [], "resumes with --resume"),
        ({"eval_strategy": "sometimes"}, [], "sometimes"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, fields, options, message):
    with pytest.raises(InputError, match=message):
        parse([recipe(tmp_path, **fields), *options])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "holds no fields"),
        ("", "holds no fields"),
        ("1: 2", "holds no fields"),
        ("seed: 1\nseed: 2", "the field seed stands twice, last in line 2"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        parse([str(tmp_path / "bad.yaml")])


@pytest.mark.parametrize("arguments", [[], ["--model_name_or_path", "m"]])
def test_without_a_recipe_the_shipped_ones_are_named(arguments):
    with pytest.raises(InputError, match="micro_stage1, micro_stage2, stage1, stage2, stage2_lora, stage2_qlora"):
        parse(arguments)


def test_a_recipe_that_is_not_there():
    with pytest.raises(InputError, match="There is no recipe stage3"):
        parse(["stage3"])


def test_zero_without_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match=r"ZeRO needs deepspeed, which is not installed.*\[deepspeed\]"):
        parse([recipe(tmp_path)])


def test_peft_under_zero_3(tmp_path):
    script, config = parse([recipe(tmp_path, use_peft=True)])
    config.deepspeed_plugin = SimpleNamespace(zero_stage=3)  # transformers makes one where DeepSpeed is installed
    with pytest.raises(InputError, match="ZeRO-3, whose sharded weights"):
        check_together(script, config)
