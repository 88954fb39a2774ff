"""A norm-aligned and a stock model, a test set about them for evaluate, and the same rows as lmms-eval tasks."""

import json
import os
import subprocess
import sys

import torch

from llava_norm_align import LlavaNormAlignForConditionalGeneration
from tests.helpers import tiny
from tests.helpers.answers import QUESTIONS, said_alone, talkative

COUNT = 24  # questions, two about each image
CHOICES = [["a cat", "red dog"], ["is red", "in a cat", "the"]]
PICTURES = """
from PIL import Image


def pictures(doc):
    return [Image.open(doc["image"])]
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_visual: !function utils.pictures
doc_to_text: question
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
SAID = """
output_type: generate_until
doc_to_target: answer
generation_kwargs: {max_new_tokens: 4, temperature: 0, do_sample: false}
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: right
"""


def models():
    """{name: model}; the aligned one has a norm behind the projector."""
    aligned = dict(norm_align_type="layer_norm", norm_align_target=3.0)
    return {
        "aligned, mine": talkative(0, LlavaNormAlignForConditionalGeneration, **aligned),
        "stock": talkative(1),
    }


def build(root):
    """Both models' folders, set.json, and the folder tasks/ with own_pictures and own_choices.

    Of the answers a half is the aligned model's, a quarter the stock one's and the rest wrong for both.
    """
    processor, both = tiny.processor(), models()
    for name, model in both.items():
        model.save_pretrained(root / name)
        processor.save_pretrained(root / name)
    rows, docs = [], []
    for index in range(COUNT):
        image, question = root / f"{index // 2}.png", QUESTIONS[index % 5]
        tiny.photo(index // 2).save(image)
        aligned, stock = both.values()
        model = [aligned, aligned, stock, None][index % 4]
        answer = "a fish" if model is None else said_alone(model, processor, question, image)
        turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
        rows.append({"id": str(index), "image": image.name, "conversations": turns, "match": "exact"})
        choices = CHOICES[index % 2]
        docs.append({"question": question, "image": str(image), "answer": answer, "choices": choices, "right": 1})
    (root / "set.json").write_text(json.dumps(rows))
    write_rows(root / "rows.jsonl", docs)
    (root / "tasks").mkdir()
    (root / "tasks" / "utils.py").write_text(PICTURES)
    for name, metric, rest in (("own_pictures", "exact_match", SAID), ("own_choices", "acc", CHOSEN)):
        head = TASK.format(name=name, metric=metric, data=root / "rows.jsonl")
        (root / "tasks" / f"{name}.yaml").write_text(head + rest)
    return docs


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def loss_of(model, processor, question, images, continuation):
    """The mean of -log p over the tokens of `continuation`, by the whole prompt without padding, in float64; and
    whether each is the most probable one."""
    text = f"USER: {'<image> ' * len(images)}{question} ASSISTANT:"
    pictures = {"images": images} if images else {}
    before = processor(text=text, **pictures, return_tensors="pt")
    ids = torch.tensor([tiny.WORDS.index(word) + 4 for word in continuation.split()])
    whole = torch.cat([before["input_ids"], ids[None]], dim=1)
    pixels = {"pixel_values": before["pixel_values"]} if images else {}
    with torch.no_grad():
        logits = model(input_ids=whole, **pixels).logits[0, -len(ids) - 1 : -1].double()
    chances = logits.log_softmax(-1)
    return -chances[range(len(ids)), ids].mean().item(), bool((logits.argmax(-1) == ids).all())


def run_lmms_eval(folder, *arguments):
    """The finished process of `python -m lmms_eval` with the class of this package, as a user starts it."""
    command = [sys.executable, "-m", "lmms_eval", "--model", "llava_norm_align", "--output_path", "results"]
    return subprocess.run(
        [*command, "--log_samples", *arguments],
        cwd=folder,
        env={**os.environ, "HF_DATASETS_CACHE": str(folder / "datasets")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
