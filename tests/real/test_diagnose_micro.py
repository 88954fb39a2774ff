"""The diagnosis of micro-LLaVA on photos, in both transformers lines, against transformers' own hidden states."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from llava_norm_align.common.samples import PHOTOS, sample_photos
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.diagnosis.diagnose import QUESTION
from tests.helpers.lines import PYTHONS, run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """diagnosis.json of each line."""
    folders = {line: tmp_path_factory.mktemp("diagnosis") for line in PYTHONS}
    for line, folder in folders.items():
        run("diagnose", cached_micro(), "--out", folder, "--no-attention", "--dtype", "float32", line=line)
    return {line: json.loads((folder / "diagnosis.json").read_text()) for line, folder in folders.items()}


def test_norms_and_angles_are_those_of_the_hidden_states(found):
    model = AutoModelForImageTextToText.from_pretrained(cached_micro(), dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(cached_micro())
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    norms, turns = [], []
    for path in sample_photos("A test", PHOTOS):
        inputs = processor(text=text, images=Image.open(path).convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        visual = inputs["input_ids"][0] == model.config.image_token_id
        first, second = (state[0][visual].double() for state in states[:2])
        norms.append(first.norm(dim=-1))
        turns.append(torch.rad2deg(torch.acos(torch.cosine_similarity(first, second, dim=-1))).mean())
    norms = torch.stack(norms)
    for result in found.values():
        assert result["images"]["names"] == list(PHOTOS)
        visual = result["norms"]["visual"]
        assert visual["n"] == norms.numel()
        assert visual["mean"] == pytest.approx(norms.mean().item(), rel=1e-4)
        assert visual["std"] == pytest.approx(norms.std(correction=0).item(), rel=1e-3)
        assert visual["p99"] == pytest.approx(norms.quantile(0.99).item(), rel=5e-3)
        turn = result["layers"][0]["visual"]["rotation_degrees"]
        assert turn == pytest.approx(torch.stack(turns).mean().item(), rel=1e-3)


def test_both_lines_agree(found):
    four, five = found["4"], found["5"]
    for name in ("encoder_features", "projector_output", "text_table", "text", "visual", "template", "system", "bos"):
        assert four["norms"][name]["n"] == five["norms"][name]["n"]
        assert four["norms"][name]["mean"] == pytest.approx(five["norms"][name]["mean"], rel=1e-3)
    for old, new in zip(four["layers"], five["layers"], strict=True):
        for kind in ("visual", "text"):
            assert old[kind]["rotation_degrees"] == pytest.approx(new[kind]["rotation_degrees"], abs=0.5)
