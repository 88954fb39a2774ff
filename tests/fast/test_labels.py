"""Token ids and label masks of a batch, against ids written by hand from LLaVA's rules.

In the golden rows a list of words stands for itself, token by token; what is supervised stands in a tuple. The
vocabulary below has one id for each word, 4 image tokens stand for an image, and "\\n" is a token.
"""

import json

import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.llava_json import read_llava_json
from llava_norm_align.data.templates import FLATTEN_PARTS, training_template
from llava_norm_align.trl_recipes.collator import LlavaCollator, to_dataset
from tests.helpers import tiny
from tests.helpers.published_tokenizers import llama2, llama3, qwen2, starts_with

pytest.importorskip("trl")

UNK, IMG = 3, 16  # the image token has the id that the tiny models know
WORDS = dict(
    [("<pad>", 0), ("<s>", 1), ("</s>", 2), ("<unk>", 3), ("what", 4), ("is", 5), ("this", 6), ("?", 7), ("a", 8)]
    + [("cat", 9), ("dog", 10), ("red", 11), ("yes", 12), ("USER:", 13), ("ASSISTANT:", 14), ("\n", 15)]
    + [("<image>", 16), ("<|im_start|>", 17), ("<|im_end|>", 18), ("user", 19), ("assistant", 20), ("system", 21)]
)
WHAT, IS, THIS, Q, A, CAT, DOG, RED, YES, USER, ASSISTANT, NL = range(4, 16)
BOS, EOS, START, END = 1, 2, 17, 18
PICTURE = [IMG] * 4
V1_TEXT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# these are 23 words, of which the vocabulary knows "a", "user" and "assistant"
V1 = [UNK, UNK, UNK, A, UNK, 19, UNK, UNK, UNK, UNK, UNK, UNK, 20, *[UNK] * 10]
# <|im_start|>system \n You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|> \n
CHATML = [START, 21, NL, UNK, UNK, A, UNK, UNK, 20, UNK, UNK, UNK, UNK, UNK, UNK, END, NL]
ASK, SAY = [START, 19, NL], [START, 20, NL]


def row(*values, image=None):
    turns = [{"from": ("human", "gpt")[n % 2], "value": value} for n, value in enumerate(values)]
    return {"id": "x", "conversations": turns} | ({"image": image} if image else {})


VICUNA_ROWS = [
    # one question about an image
    (row("<image>\nwhat is this ?", "a cat", image="a.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, IS, THIS, Q, ASSISTANT, (A, CAT, EOS)]),
    # the image after the question: LLaVA moves it to the front
    (row("what is this ?\n<image>", "a dog", image="b.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, IS, THIS, Q, ASSISTANT, (A, DOG, EOS)]),
    # an answer of two lines
    (row("<image>\nwhat ?", "a cat\nred", image="a.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, Q, ASSISTANT, (A, CAT, NL, RED, EOS)]),
    # several turns: the next question follows </s> without a space
    (row("<image>\nwhat ?", "cat", "is this red ?", "yes", image="b.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, Q, ASSISTANT, (CAT, EOS), USER, IS, THIS, RED, Q, ASSISTANT, (YES, EOS)]),
    (row("<image>\nwhat ?", "cat", "red ?", "yes", "a cat ?", "yes yes", image="a.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, Q, ASSISTANT, (CAT, EOS), USER, RED, Q, ASSISTANT, (YES, EOS), USER, A, CAT,
      Q, ASSISTANT, (YES, YES, EOS)]),
    # text alone
    (row("what is a cat ?", "a cat"), [BOS, *V1, USER, WHAT, IS, A, CAT, Q, ASSISTANT, (A, CAT, EOS)]),
    (row("what ?", "red", "yes ?", "yes"),
     [BOS, *V1, USER, WHAT, Q, ASSISTANT, (RED, EOS), USER, YES, Q, ASSISTANT, (YES, EOS)]),
    (row("is\n\nthis ?", "yes\n\ncat"),
     [BOS, *V1, USER, IS, NL, NL, THIS, Q, ASSISTANT, (YES, NL, NL, CAT, EOS)]),
    # the image in a later turn
    (row("what ?", "red", "<image>\nis this a dog ?", "yes", image="b.png"),
     [BOS, *V1, USER, WHAT, Q, ASSISTANT, (RED, EOS), USER, *PICTURE, NL, IS, THIS, A, DOG, Q, ASSISTANT, (YES, EOS)]),
    (row("a ?", "cat", "a ?", "dog", "this ?\n<image>", "red dog", image="a.png"),
     [BOS, *V1, USER, A, Q, ASSISTANT, (CAT, EOS), USER, A, Q, ASSISTANT, (DOG, EOS), USER, *PICTURE, NL, THIS, Q,
      ASSISTANT, (RED, DOG, EOS)]),
    # words of the frame inside an answer stay words
    (row("<image>\nwhat ?", "USER: cat ASSISTANT: dog", image="a.png"),
     [BOS, *V1, USER, *PICTURE, NL, WHAT, Q, ASSISTANT, (USER, CAT, ASSISTANT, DOG, EOS)]),
]  # fmt: skip
CHATML_ROWS = [
    (row("<image>\nwhat ?", "a cat", image="a.png"),
     [*CHATML, *ASK, *PICTURE, NL, WHAT, Q, END, NL, *SAY, (A, CAT, END), NL]),
    (row("<image>\nwhat ?", "cat", "red ?", "yes", image="b.png"),
     [*CHATML, *ASK, *PICTURE, NL, WHAT, Q, END, NL, *SAY, (CAT, END), NL, *ASK, RED, Q, END, NL, *SAY, (YES, END),
      NL]),
    (row("what ?", "red"), [*CHATML, *ASK, WHAT, Q, END, NL, *SAY, (RED, END), NL]),
    (row("what ?", "red", "<image>\nthis ?", "a dog", image="a.png"),
     [*CHATML, *ASK, WHAT, Q, END, NL, *SAY, (RED, END), NL, *ASK, *PICTURE, NL, THIS, Q, END, NL, *SAY, (A, DOG, END),
      NL]),
]  # fmt: skip
PLAIN_ROWS = [  # the human text is dropped
    (row("what is this ?\n<image>", "a cat", image="a.png"), [BOS, *PICTURE, (A, CAT, NL)]),
    (row("<image>\nwhat ?", "a red dog", image="b.png"), [BOS, *PICTURE, (A, RED, DOG, NL)]),
    (row("<image>", "this\ncat", image="a.png"), [BOS, *PICTURE, (THIS, NL, CAT, NL)]),
    (row("<image>\nwhat ?", "dog", image="a.png"), [BOS, *PICTURE, (DOG, NL)]),
    (row("red ? <image>", "is this a cat ?", image="b.png"), [BOS, *PICTURE, (IS, THIS, A, CAT, Q, NL)]),
]


def make_processor(bos=True):
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    if bos:
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = tiny.processor()
    made.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<|im_start|>", "<|im_end|>"],
        model_input_names=["input_ids", "attention_mask"],
    )
    return made


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (40, 30), colour).save(folder / name)
    return folder


def read(entries, images):
    path = images / "data.json"
    path.write_text(json.dumps(entries))
    return list(read_llava_json(path, images))


def expand(golden, length):
    """Token ids and labels of a golden row, padded on the right."""
    ids, labels = [], []
    for item in golden:
        answer = item if isinstance(item, tuple) else ()
        ids += answer or [item]
        labels += answer or [-100]
    padding = length - len(ids)
    return ids + [0] * padding, labels + [-100] * padding


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """TRL's trainer around a dataset and a collator."""
    from trl import SFTConfig, SFTTrainer

    def make(processor, collator, dataset):
        args = SFTConfig(
            output_dir=str(tmp_path_factory.mktemp("run")),
            per_device_eval_batch_size=len(dataset),
            max_length=None,
            report_to=[],
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
        )
        return SFTTrainer(
            tiny.stock_llava(), args, data_collator=collator, train_dataset=dataset, processing_class=processor
        )

    return make


@pytest.mark.parametrize(
    ("rows", "template", "bos"),
    [(VICUNA_ROWS, "vicuna_v1", True), (CHATML_ROWS, "smollm2", False), (PLAIN_ROWS, "plain", True)],
    ids=["vicuna_v1", "smollm2", "plain"],
)
def test_golden_rows(rows, template, bos, images, trainer):
    processor = make_processor(bos)
    text = template if template == "plain" else training_template(processor, template)
    dataset = to_dataset(read([entry for entry, _ in rows], images))
    run = trainer(processor, LlavaCollator(processor, text, max_length=64), dataset)
    (batch,) = run.get_eval_dataloader(dataset)
    length = max(len(expand(golden, 0)[0]) for _, golden in rows)
    expected = [expand(golden, length) for _, golden in rows]
    assert batch["input_ids"].tolist() == [ids for ids, _ in expected]
    assert batch["labels"].tolist() == [labels for _, labels in expected]
    assert batch["attention_mask"].tolist() == [[int(token != 0) for token in ids] for ids, _ in expected]
    assert len(batch["pixel_values"]) == sum("image" in entry for entry, _ in rows)
    assert not (batch["labels"] == IMG).any()
    assert torch.isfinite(run.compute_loss(run.model, batch))


def test_there_are_20_golden_rows():
    assert len([*VICUNA_ROWS, *CHATML_ROWS, *PLAIN_ROWS]) == 20


def test_each_image_goes_with_its_row(images):
    processor = make_processor()
    entries = [row("<image>\nwhat ?", "red", image=name) for name in ("a.png", "b.png", "a.png")]
    entries.insert(1, row("what ?", "red"))
    batch = LlavaCollator(processor, training_template(processor, "vicuna_v1"))(to_dataset(read(entries, images)))
    red, blue, _ = (batch["pixel_values"][n].mean(dim=(1, 2)).tolist() for n in range(3))
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert (batch["pixel_values"][0] == batch["pixel_values"][2]).all()


def collate(examples, template="vicuna_v1", **options):
    processor = make_processor()
    text = template if template == "plain" else training_template(processor, template)
    return LlavaCollator(processor, text, **options)(examples)


def say(question, answer, **columns):
    return {"prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}], **columns}  # fmt: skip


def test_rows_of_trl_and_of_llava_are_one_batch():
    image = Image.new("RGB", (40, 30))
    message = say("what ?", "cat")
    joined = {"messages": [*message["prompt"], *message["completion"]]}
    batch = collate([message, joined | {"images": []}, joined | {"images": [image]}, joined | {"image": image}])
    text, _ = expand([BOS, *V1, USER, WHAT, Q, ASSISTANT, (CAT, EOS)], 35)
    with_image, labels = expand([BOS, *V1, USER, *PICTURE, NL, WHAT, Q, ASSISTANT, (CAT, EOS)], 35)
    assert batch["input_ids"].tolist() == [text, text, with_image, with_image]
    assert batch["labels"][3].tolist() == labels
    assert "images" not in message  # examples are left as they are


def test_a_batch_of_text_alone_has_no_pixels_or_a_blank_image():
    examples = [say("what ?", "cat"), say("red ?", "yes")]
    assert "pixel_values" not in collate(examples)
    batch = collate(examples, image_in_every_batch=True)
    assert batch["pixel_values"].shape == (1, 3, 28, 28)
    assert (batch["input_ids"] == IMG).sum(dim=1).tolist() == [0, 0, 4]
    assert (batch["labels"] != -100).sum(dim=1).tolist() == [2, 2, 0]
    with_image = [*examples, say("what ?", "cat", images=[Image.new("RGB", (40, 30))])]
    assert len(collate(with_image, image_in_every_batch=True)["input_ids"]) == 3


def test_a_dataset_is_made_in_chunks(images, monkeypatch):
    entries = [row("what ?", str(number)) for number in range(7)]
    expected = to_dataset(read(entries, images)).to_list()
    monkeypatch.setattr("llava_norm_align.trl_recipes.collator.CHUNK", 3)
    assert to_dataset(read(entries, images)).to_list() == expected
    assert [example["messages"][1]["content"] for example in expected] == [
        [{"type": "text", "text": str(number)}] for number in range(7)
    ]
    with pytest.raises(InputError, match="has no rows"):
        to_dataset([])


def test_rows_that_cannot_be_learned(images):
    image = Image.new("RGB", (40, 30))
    with pytest.raises(InputError, match="begins 'what is this' has 31 tokens, more than max_length 30"):
        collate([say("what", "cat"), say("what is this", "cat")], max_length=30)
    assert collate([say("what is this", "cat")], max_length=31)["input_ids"].shape == (1, 31)
    with pytest.raises(InputError, match="begins 'red .' has no answer to learn from"):
        collate([say("what", "cat"), {"messages": [{"role": "user", "content": "red ?"}]}])
    with pytest.raises(InputError, match="no image file at .*absent.png"):
        collate([say("what", "cat", images=[str(images / "absent.png")])])
    for bad in (say("what", "cat"), say("what", "cat", images=[image, image])):
        with pytest.raises(InputError, match="the first stage takes one image and one answer"):
            collate([bad], "plain")
    answer = [{"type": "image"}, {"type": "text", "text": "cat"}]
    with pytest.raises(InputError, match="4 image tokens would be learned"):
        collate([{"messages": [{"role": "user", "content": [{"type": "text", "text": "what"}]},
                               {"role": "assistant", "content": answer}], "images": [image]}])  # fmt: skip


def with_tokenizer(backend, special, kind="llava", **tokens):
    """A tiny processor with a tokenizer like a published one."""
    backend.add_special_tokens([*special, "<image>"])
    made = tiny.processor(kind=kind)
    made.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<image>", *special],
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )
    made.image_token_id = made.tokenizer.convert_tokens_to_ids("<image>")
    return made


def as_llava(text, processor):
    """Token ids by LLaVA's rule: what lies around an image is tokenized as texts of their own, BOS once."""
    ids = [1]
    for number, chunk in enumerate(text.split("<image>")):
        ids += [processor.image_token_id] * 4 * (number > 0)
        ids += processor.tokenizer(chunk).input_ids[1:]
    return ids


@pytest.mark.parametrize(
    "answers", [("a cat", "red"), ("\nWhat", "\n\nx"), (" two", "1. x\n2. y\n"), ("x </ s>", "ß 猫")]
)
def test_sentencepiece_ids_are_llavas(answers, images):
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    tokens = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    processor = with_tokenizer(llama2(), special, **tokens)
    first, second = answers
    question = f"{V1_TEXT} USER: <image>\nWhat is this? ASSISTANT:"
    turn = f"{question} {first}</s>"
    next_question = f"{turn}USER: In the picture? ASSISTANT:"
    whole = f"{next_question} {second}</s>"
    ids = as_llava(whole, processor)
    labels = [-100] * len(ids)
    for before, after in ((question, turn), (next_question, whole)):
        start, end = len(as_llava(before, processor)), len(as_llava(after, processor))
        labels[start:end] = ids[start:end]

    entry = row("<image>\nWhat is this?", first, "In the picture?", second, image="a.png")
    template = training_template(processor, "vicuna_v1")
    batch = LlavaCollator(processor, template)(to_dataset(read([entry], images)))
    assert batch["input_ids"].tolist() == [ids]
    assert batch["labels"].tolist() == [labels]

    batch = LlavaCollator(processor, "plain")(to_dataset(read([row("<image>", first, image="a.png")], images)))
    ids = as_llava(f"<image>{first}\n", processor)
    assert batch["input_ids"].tolist() == [ids]
    assert batch["labels"].tolist() == [[-100] * 5 + ids[5:]]


@pytest.mark.parametrize("kind", ["llava", "llava_next"])
@pytest.mark.parametrize("name", ["llama3", "llama3_2", "qwen2_5"])
def test_byte_level_tokenizers_with_their_own_templates(name, kind, images):
    from trl import chat_template_utils

    if name == "qwen2_5":
        backend, special, tokens = qwen2(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {}
        begin, end = "", "<|im_end|>"
    else:
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>"]
        backend, tokens = llama3(), dict(bos_token="<|begin_of_text|>")
        backend.add_special_tokens(special)
        backend.post_processor = starts_with("<|begin_of_text|>", backend)
        begin, end = "<|begin_of_text|>", "<|eot_id|>"
    processor = with_tokenizer(backend, special, kind, pad_token="<|endoftext|>", eos_token=end, **tokens)
    processor.chat_template = FLATTEN_PARTS + getattr(chat_template_utils, f"{name}_chat_template")
    entries = [
        row("<image>\nwhat ?", "a cat", "red ?", "yes it is", image="a.png"),
        row("what ?", "The dog", "<image>\nThis?", "12 dogs", image="b.png"),
        row("what ?", "text"),
    ]
    batch = LlavaCollator(processor, training_template(processor))(to_dataset(read(entries, images)))
    expected = [("a cat", "yes it is"), ("The dog", "12 dogs"), ("text",)]
    for ids, labels, answers in zip(batch["input_ids"], batch["labels"], expected, strict=True):
        text = processor.tokenizer.decode(ids)
        assert text.startswith(begin)
        assert text.count("<|begin_of_text|>") == (begin != "")
        said = processor.tokenizer.decode(ids[labels != -100])
        # TRL's mark for Qwen2.5 takes the ends of line around a turn in
        assert said.replace("\n", "") == "".join(answer + end for answer in answers)
        assert (labels[labels != -100] == ids[labels != -100]).all()
    image_tokens = (batch["input_ids"] == processor.image_token_id).sum(dim=1)
    assert image_tokens[0] == image_tokens[1] >= 4
    assert image_tokens[2] == 0
