"""Models that answer in words, a test set about them, and evaluate called on them."""

import json

import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from llava_norm_align.evaluation.evaluate import evaluate
from tests.helpers import tiny

QUESTIONS = ["what is in the picture ?", "what is a cat ?", "red", "is the dog in the red picture ?", "a dog"]


def prompt_of(question, image=True):
    return f"USER: {'<image> ' if image else ''}{question} ASSISTANT:"


def said_alone(model, processor, question, image, tokens=4):
    """One question in transformers' own loop, without padding."""
    picture = None if image is None else Image.open(image).convert("RGB")
    inputs = processor(text=prompt_of(question, image is not None), images=picture, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


def talkative(seed, cls=LlavaForConditionalGeneration, **fields):
    """A tiny model whose answers are always words."""
    torch.manual_seed(seed)
    model = tiny.randomize(cls(tiny.llava_config(cls.config_class, **fields)), seed).eval()
    words = range(4, 4 + len(tiny.WORDS))
    with torch.no_grad():
        model.lm_head.weight[[index for index in range(tiny.VOCABULARY) if index not in words]] = 0
    return model


def build(root):
    """Models a, b and c, and a test set of 20 rows about 10 images to which a's answers are mostly right."""
    processor = tiny.processor()
    for seed, name in enumerate("abc"):
        talkative(seed).save_pretrained(root / name)
        processor.save_pretrained(root / name)
    model, rows = talkative(0), []
    for index in range(20):
        image, question = f"{index // 2}.png", QUESTIONS[index % 5]
        tiny.photo(index // 2).save(root / image)
        answer = said_alone(model, processor, question, root / image) if index % 4 else "a fish"
        turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": answer}]
        row = {"id": f"r{index}", "image": image, "conversations": turns, "match": "exact"}
        rows.append(row | {"type": "odd" if index % 2 else "even"})
    (root / "set.json").write_text(json.dumps(rows))
    return root


def run(root, model="a", *baselines, out, tasks="set.json", **options):
    options = {"max_new_tokens": 4, "batch_size": 3} | options
    names = [
        ",".join(str(root / part) if part else "" for part in str(name).split(",")) for name in (model, *baselines)
    ]
    return evaluate(names[0], [str(root / tasks)], baselines=names[1:], out=out, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
