"""What can be wrong with a norm-aligned folder: {check that fails: {what was done: damage}}.

A damage changes a folder made by `sound` and returns what the failed check's detail must name.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from llava_norm_align.conversion.convert import convert
from tests.helpers.convert import VOCAB, tiny_llava

CODE = "modeling_llava_norm_align.py"
GAIN, BIAS = "multi_modal_projector.align_norm.weight", "multi_modal_projector.align_norm.bias"
INDEX = "model.safetensors.index.json"


def sound(folder: Path, norm_type: str = "layer_norm", bias: bool = True, **kind) -> Path:
    """A tiny converted LLaVA in three shards, the last of which is the norm's."""
    source = tiny_llava(folder.with_name(f"{folder.name}-source"), **{"shards": 2, **kind})
    convert(str(source), folder, norm_type=norm_type, bias=bias, report=False)
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def edit(folder, name, **fields):
    """Set fields of a JSON file; None removes one."""
    content = {**(read(folder, name) if (folder / name).exists() else {}), **fields}
    content = {key: value for key, value in content.items() if value is not None}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def norm_file(folder):
    return folder / read(folder, INDEX)["weight_map"][GAIN]


def change_tensor(folder, name, change):
    """Put `change(tensor)` in a tensor's place, or take it out (None), in its shard and the index."""
    index = read(folder, INDEX)
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    new = change(tensors.pop(name))
    if new is None:
        del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))
    else:
        tensors[name] = new
    save_file(tensors, file, metadata={"format": "pt"})


def some_tensor(folder):
    return next(name for name in read(folder, INDEX)["weight_map"] if name.endswith("layers.1.mlp.up_proj.weight"))


def cut_shard(folder):
    file = folder / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file.name


def remove_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors"


def remove_index(folder):
    (folder / INDEX).unlink()
    return "no weights"


def move_in_index(folder):
    index, name = read(folder, INDEX), some_tensor(folder)
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
    (folder / INDEX).write_text(json.dumps(index))
    return name


def leave_out_of_index(folder):
    index, name = read(folder, INDEX), some_tensor(folder)
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    return name


def pickle_weights(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    return "pytorch_model.bin"


def stray(name):
    def damage(folder):
        save_file({"x": torch.zeros(1)}, folder / name)
        return name

    return damage


def broken_json(name, content='{"a": 1,'):
    def damage(folder):
        (folder / name).write_text(content)
        return name

    return damage


def remove_tensor(folder):
    name = some_tensor(folder)
    change_tensor(folder, name, lambda tensor: None)
    return "layers.1.mlp.up_proj.weight"


def add_tensor(folder):
    file = norm_file(folder)
    save_file({**load_file(file), "language_model.model.layers.7.extra": torch.zeros(2)}, file)
    index = read(folder, INDEX)
    index["weight_map"]["language_model.model.layers.7.extra"] = file.name
    (folder / INDEX).write_text(json.dumps(index))
    return "layers.7.extra"


def remove_norm(folder):
    for name in (GAIN, BIAS):
        change_tensor(folder, name, lambda tensor: None)
    norm_file_ = next(file for file in folder.glob("*.safetensors") if not load_file(file))
    norm_file_.unlink()
    return "align_norm"


def shorten_gain(folder):
    change_tensor(folder, GAIN, lambda gain: gain[:-1].clone())
    return "align_norm.weight"


def other_width(folder):
    edit(folder, "config.json", text_config={**read(folder, "config.json")["text_config"], "intermediate_size": 40})
    return "of another shape"


def unknown_tower(folder):
    edit(folder, "config.json", vision_config={**read(folder, "config.json")["vision_config"], "model_type": "eye"})
    return "config.json"


def set_fields(name, expected, **fields):
    def damage(folder):
        edit(folder, name, **fields)
        return expected

    return damage


def set_norm(name, change, expected):
    def damage(folder):
        change_tensor(folder, name, change)
        return expected

    return damage


def put(value):
    def change(tensor):
        tensor[3] = value
        return tensor

    return change


def scaled_target(name, field):
    def damage(folder):
        edit(folder, name, **{field: read(folder, name)[field] * 1.001})
        return "norm_align_target in config.json"

    return damage


def edit_code(folder):
    (folder / CODE).write_text((folder / CODE).read_text() + "\n# mine\n")
    return CODE


def remove_code(folder):
    (folder / "configuration_llava_norm_align.py").unlink()
    return "configuration_llava_norm_align.py"


def other_auto_map(folder):
    auto_map = read(folder, "config.json")["auto_map"]
    edit(folder, "config.json", auto_map=auto_map | {"AutoModel": auto_map["AutoModelForImageTextToText"]})
    return "auto_map"


def custom_generate(folder):
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text("def generate(model, **inputs): ...")
    return "custom_generate/generate.py"


def remove_template(folder):
    (folder / "chat_template.json").unlink()
    return "chat_template.jinja"


def template(text, expected="chat_template.json"):
    return set_fields("chat_template.json", expected, chat_template=text)


def move_image_token(folder):
    content = read(folder, "tokenizer.json")
    content["added_tokens"][-1]["content"] = "<picture>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return "tokenizer.json"


def grid_of_another_size(folder):
    edit(folder, "preprocessor_config.json", size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42})
    return "42 x 42"


def nan_in_weight(folder):
    change_tensor(folder, some_tensor(folder), put(float("nan")))
    return "not finite"


PARTS = "{% for part in messages[0]['content'] %}"


def token_outside_table(folder):
    """As after adding tokens without resizing the table."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": VOCAB, "content": "<new>", **flags})
    path.write_text(json.dumps(content))
    return f"the id {VOCAB}, but the text table has {VOCAB} rows"


def tied_for_one_line(folder):
    """4.57 would use the text embeddings as the head, 5 the stored head."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(content))
    return "transformers 4.57 would use the embeddings, 5 the head"


DAMAGES = {
    1: {
        "shard cut": cut_shard,
        "shard missing": remove_shard,
        "index missing": remove_index,
        "index places a tensor elsewhere": move_in_index,
        "index leaves a tensor out": leave_out_of_index,
        "weights pickled": pickle_weights,
        "stray shard": stray("model-00009-of-00009.safetensors"),
        "stray single file": stray("model.safetensors"),
        "stray .bin": stray("pytorch_model.bin"),
        "adapter": stray("adapter_model.safetensors"),
        "config cut": broken_json("config.json"),
        "generation config cut": broken_json("generation_config.json"),
        "processor config cut": broken_json("processor_config.json"),
        "image processor no object": broken_json("preprocessor_config.json", "[1]"),
        "tokenizer cut": broken_json("tokenizer.json"),
        "tokenizer config cut": broken_json("tokenizer_config.json"),
        "added tokens cut": broken_json("added_tokens.json"),
        "template file cut": broken_json("chat_template.json"),
    },
    2: {
        "a head that one line ties": tied_for_one_line,
        "tensor missing": remove_tensor,
        "tensor too many": add_tensor,
        "norm missing": remove_norm,
        "norm of another shape": shorten_gain,
        "config of another width": other_width,
        "config of an unknown tower": unknown_tower,
        "unknown norm type": set_fields("config.json", "norm_align_type", norm_align_type="batch_norm"),
        "image token outside the table": set_fields("config.json", "5000", image_token_index=5000),
        "negative image token": set_fields("config.json", "-1", image_token_index=-1),
    },
    3: {
        "gain in bf16": set_norm(GAIN, lambda gain: gain.bfloat16(), "BF16"),
        "bias in fp16": set_norm(BIAS, lambda bias: bias.half(), "F16"),
        "NaN in the gain": set_norm(GAIN, put(float("nan")), "align_norm.weight"),
        "inf in the bias": set_norm(BIAS, put(float("inf")), "align_norm.bias"),
        "gain of zeros": set_norm(GAIN, torch.zeros_like, "align_norm.weight"),
    },
    4: {
        "calibration cut": broken_json("norm_align/calibration.json"),
        "calibration without T": set_fields("norm_align/calibration.json", "target_norm", target_norm=None),
        "calibration with text for T": set_fields("norm_align/calibration.json", "target_norm", target_norm="one"),
        "another T in calibration": scaled_target("norm_align/calibration.json", "target_norm"),
        "another T in config": scaled_target("config.json", "norm_align_target"),
        "no T in config": set_fields("config.json", "calibration.json gives", norm_align_target=None),
        "another gain on all channels": set_norm(GAIN, lambda gain: gain * 1.001, "align_norm.weight"),
    },
    5: {
        "code edited": edit_code,
        "code missing": remove_code,
        "another auto_map": other_auto_map,
        "no auto_map": set_fields("config.json", "auto_map", auto_map=None),
        "a generate of its own": custom_generate,
    },
    6: {
        "another patch size": set_fields("processor_config.json", "patch_size", patch_size=16),
        "CLS not counted": set_fields(
            "processor_config.json", "num_additional_image_tokens", num_additional_image_tokens=None
        ),
        "another strategy": set_fields(
            "processor_config.json", "vision_feature_select_strategy", vision_feature_select_strategy="full"
        ),
        "size as text": set_fields("preprocessor_config.json", "preprocessor_config.json", size="wide"),
        "images too large for the tower": grid_of_another_size,
        "another image token id": set_fields("config.json", "tokenizer.json", image_token_index=7),
        "image token not in the tokenizer": move_image_token,
        "no chat template": remove_template,
        "template without image": template(PARTS + "{{ part['text'] }}{% endfor %}"),
        "template with one image only": template("<image>{{ messages[0]['content'][-1]['text'] }}"),
        "template with one image at most": template(
            "{% if messages[0]['content'] | length > 1 %}<image>{% endif %}{{ messages[0]['content'][-1]['text'] }}"
        ),
        "template without text": template(PARTS + "{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}"),
        "template cut": template("{% for"),
        "template that raises": template("{{ raise_exception('no') }}"),
        "processor with code": set_fields(
            "preprocessor_config.json", "auto_map", auto_map={"AutoImageProcessor": "mine.Mine"}
        ),
    },
    7: {
        "a token outside the table": token_outside_table,
        "class of transformers 5": set_fields(
            "tokenizer_config.json", "TokenizersBackend", tokenizer_class="TokenizersBackend"
        ),
        "class of another type of model": set_fields(
            "tokenizer_config.json", '"LlamaTokenizer" -> PreTrainedTokenizerFast', tokenizer_class="LlamaTokenizer"
        ),
        "list of transformers 5": set_fields(
            "tokenizer_config.json", "extra_special_tokens", extra_special_tokens=["<extra1>"]
        ),
        "no vocabulary": broken_json("tokenizer.json", '{"model": {}, "added_tokens": []}'),
        "tokenizer with code": set_fields(
            "tokenizer_config.json", "auto_map", auto_map={"AutoTokenizer": ["mine.Mine", None]}
        ),
    },
}
LOADED = {  # of check 8
    "NaN in a weight": nan_in_weight,
    "images divided by zero": set_fields("preprocessor_config.json", "not finite", image_std=[0.0, 0.0, 0.0]),
}
