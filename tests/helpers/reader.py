"""Run by tests as a script in either transformers line, without the package: what stock LLaVA folders load as and say.

usage: python reader.py IMAGE QUESTIONS FOLDER...      QUESTIONS: a JSON list
For each folder, FOLDER.json holds the report and FOLDER.pt logits, pixel values and what the tower sees.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

TEXT = "what is a cat ?"


def read(folder, image, questions=()):
    """Loading report, the processor's work on one question and greedy answers; and tensors."""
    torch.set_num_threads(1)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model.eval()
    processor = AutoProcessor.from_pretrained(folder)
    picture = Image.open(image).convert("RGB")
    prompts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
            add_generation_prompt=True,
        )
        for question in [TEXT, *questions]
    ]
    inputs = processor(text=prompts[0], images=picture, return_tensors="pt")
    pixels = inputs["pixel_values"].to(model.dtype)
    text_ids = processor.tokenizer(TEXT, return_tensors="pt").input_ids
    answers = []
    with torch.no_grad():
        features = model.model.get_image_features(pixels)
        features = features.pooler_output if hasattr(features, "pooler_output") else features
        tensors = {
            "logits": model(**inputs).logits,
            "text_logits": model(input_ids=text_ids).logits,
            "pixel_values": inputs["pixel_values"],
            "vision": model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2],
        }
        for prompt in prompts[1:]:
            asked = processor(text=prompt, images=picture, return_tensors="pt")
            ids = model.generate(**asked, do_sample=False, max_new_tokens=6)[0, asked["input_ids"].shape[1] :]
            answers.append(processor.tokenizer.decode(ids, skip_special_tokens=True).strip())
    report = {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "prompt": prompts[0],
        "input_ids": inputs["input_ids"][0].tolist(),
        "inputs": sorted(inputs),
        "text_ids": text_ids[0].tolist(),
        "image_tokens": int((inputs["input_ids"] == model.config.image_token_index).sum()),
        "image_features": features[0].shape[0],
        "answers": answers,
    }
    return report, tensors


def run_reader(python, image, questions, folders):
    """Run this file in `python`, an interpreter of either line."""
    command = [python, __file__, image, json.dumps(questions), *folders]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [str(part) for part in command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    warnings.filterwarnings("error", category=FutureWarning)
    sys.modules["llava_norm_align"] = None
    image, questions, *folders = sys.argv[1:]
    for folder in folders:
        report, tensors = read(folder, image, json.loads(questions))
        torch.save(tensors, f"{folder}.pt")
        Path(f"{folder}.json").write_text(json.dumps(report))
