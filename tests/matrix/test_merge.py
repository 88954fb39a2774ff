"""A merged folder loads alone, with code, processor and chat template, in both transformers lines."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from llava_norm_align.conversion.convert import convert
from llava_norm_align.trl_recipes.lora import lora_config
from llava_norm_align.trl_recipes.merge import merge
from tests.helpers import lines, tiny
from tests.helpers.convert import tiny_llava

CLASSES = {"norm-aligned": "LlavaNormAlignForConditionalGeneration", "stock": "LlavaForConditionalGeneration"}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_merged_folders_load_alone_in_both_lines(tmp_path):
    stock = tiny_llava(tmp_path / "stock")
    convert(str(stock), tmp_path / "norm-aligned", report=False)
    ids = torch.tensor([[1, 40, *[299] * 4, 50, 60]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    torch.save(inputs, tmp_path / "inputs.pt")
    expected, tasks = {}, []
    for kind in CLASSES:
        base, adapter, merged = tmp_path / kind, tmp_path / f"{kind}-adapter", tmp_path / f"{kind}-merged"
        model = AutoModelForImageTextToText.from_pretrained(base)
        tiny.randomize(get_peft_model(model, lora_config(model, rank=4, alpha=8))).save_pretrained(adapter)
        # what was randomized in the base too is not in the adapter
        whole = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), adapter).eval()
        with torch.no_grad():
            expected[kind] = whole(**inputs).logits
        merge(adapter, merged, base=str(base))
        task = {"folder": str(merged), "kind": "llava"}
        tasks.append({**task, "do": "answer", "inputs": str(tmp_path / "inputs.pt")})
        tasks.append({**task, "do": "read"} if kind == "norm-aligned" else None)
    for line in ("4", "5"):
        outs = [{**task, "out": str(tmp_path / f"{line}-{number}.pt")} for number, task in enumerate(tasks) if task]
        results = lines.run_alone(outs, tmp_path, lines.PYTHONS[line])
        answers = {"norm-aligned": (results[0], outs[0]), "stock": (results[2], outs[2])}
        for kind, (result, task) in answers.items():
            assert (result["class"], result["missing"]) == (CLASSES[kind], [])
            torch.testing.assert_close(torch.load(task["out"]), expected[kind], rtol=0, atol=1e-4)
        assert (results[1]["missing"], results[1]["unexpected"]) == ([], [])
        assert results[1]["norm_dtype"] == "torch.float32"
        assert results[1]["prompt"] == "USER: <image>\nwhat is a cat ASSISTANT:"
