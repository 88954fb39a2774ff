"""Checkpoints of a training load alone, with code, processor and chat template, in both transformers lines."""

import pytest
import torch

pytest.importorskip("trl")

from tests.helpers import lines, tiny
from tests.helpers.training import norm_aligned, stored, trainer


def test_every_checkpoint_loads_alone_in_both_lines(tmp_path):
    run = trainer(norm_aligned(), tmp_path / "out", save_steps=1)
    run.train()
    inputs = tiny.inputs()
    folders = [tmp_path / "out" / f"checkpoint-{step}" for step in (0, 1, 2)]
    assert torch.equal(
        stored(folders[2])["multi_modal_projector.align_norm.weight"],
        run.model.model.multi_modal_projector.align_norm.weight,
    )
    with torch.no_grad():
        trained = run.model.eval()(**inputs).logits
    for line in ("4", "5"):
        tasks = [
            {"do": "read", "folder": str(folder), "kind": "llava", "out": str(tmp_path / f"{folder.name}-{line}.pt")}
            for folder in folders
        ]
        results = lines.run_alone(tasks, tmp_path, lines.PYTHONS[line])
        for folder, result in zip(folders, results, strict=True):
            assert (result["missing"], result["unexpected"]) == ([], [])
            assert result["class"] == "LlavaNormAlignForConditionalGeneration"
            assert result["norm_dtype"] == "torch.float32"
            assert result["prompt"] == "USER: <image> what is a cat ASSISTANT:"
            assert result["input_ids"] == inputs["input_ids"][0].tolist()
            found = torch.load(tmp_path / f"{folder.name}-{line}.pt")
            assert torch.equal(found["pixel_values"], inputs["pixel_values"])
            same = torch.allclose(found["logits"], trained, atol=1e-5)
            assert same == (folder.name == "checkpoint-2")
