"""Which tokens of a prompt are the question's, the system prompt's, the template's: marked by hand."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.diagnosis.prompts import around_question, make_prompt, token_parts
from llava_norm_align.diagnosis.structure import Structure, find_structure
from llava_norm_align.diagnosis.tokens import GROUPS, SYSTEM, TEMPLATE, TEXT, Prompt, group_tokens
from tests.helpers import tiny

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VICUNA = (
    "A chat. {% for message in messages %}{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }} "
    "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LLAMA3 = (
    "<s>{% for message in messages %}<h>{{ message['role'] }}</h>\n\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
REFUSING = (
    "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    "Q: {{ messages[0]['content'][0]['text'] }} A:"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<image>", "<h>", "</h>", "<|eot|>"]


def bytes_processor(template):
    """A processor whose tokenizer has one token a byte, as the smallest pieces of a byte-level one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    processor = tiny.processor()
    processor.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<s>", additional_special_tokens=SPECIAL
    )
    processor.chat_template = template
    return processor


def marked(processor, text, question):
    """The characters of the text that are the question's, and those that are the system prompt's."""
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    parts = token_parts(processor, ids, question)
    return ["".join(processor.tokenizer.decode(ids[parts == part]).split()) for part in (TEXT, SYSTEM)]


@pytest.mark.parametrize(
    ("template", "system"),
    [
        (CHATML, "<|im_start|>system\nYou help."),
        (VICUNA, "A chat. "),
        (LLAMA3, ""),
        (REFUSING, ""),
        (None, ""),
    ],
)
def test_the_system_prompt_is_what_stands_before_the_users_header(template, system):
    processor = bytes_processor(template)
    found, _ = around_question(processor)
    assert "".join(found.split()) == "".join(system.split())
    if template not in (None, REFUSING):
        content = [{"type": "image"}, {"type": "text", "text": "Is it a chat? é"}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        assert marked(processor, text, "Is it a chat? é") == ["Isitachat?é", "".join(system.split())]


def test_a_question_that_also_stands_in_the_system_prompt():
    processor = bytes_processor(CHATML)
    text = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n<image>You help.<|im_end|>\n"
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    parts = token_parts(processor, ids, "You help.")
    tail = processor.tokenizer("You help.<|im_end|>\n", add_special_tokens=False, return_tensors="pt").input_ids.shape[
        1
    ]
    assert (parts == TEXT).nonzero()[0].item() == len(ids) - tail
    assert (parts == SYSTEM).any()


@pytest.mark.parametrize("question", ["assistant", "s", "<|im_end|>", "user"])
def test_a_question_that_also_stands_in_what_follows(question):
    processor = bytes_processor(CHATML)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    before = processor.tokenizer(text[: text.index("<image>") + 7], add_special_tokens=False).input_ids
    tokens = len(processor.tokenizer(question, add_special_tokens=False).input_ids)
    parts = token_parts(processor, ids, question)
    assert (parts == TEXT).nonzero()[:, 0].tolist() == list(range(len(before), len(before) + tokens))


@pytest.mark.parametrize(
    ("template_writes", "tokenizer_adds", "expected"), [(1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 0, 0)]
)
def test_one_beginning_of_sequence(template_writes, tokenizer_adds, expected):
    processor = tiny.processor()
    if template_writes:
        processor.chat_template = "<s>" + processor.chat_template
    if tokenizer_adds:
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        processor.tokenizer.backend_tokenizer.post_processor = begin
    ids = prepare_inputs(processor, ["what is a cat"], [tiny.photo()])["input_ids"][0].tolist()
    assert ids.count(1) == expected and (ids[0] == 1) == bool(expected)


def structure_with(**fields):
    values = dict(
        layers=torch.nn.ModuleList(),
        embeddings=torch.nn.Embedding(2, 2),
        projector=None,
        projector_name=None,
        placeholders=(9,),
        newlines=torch.empty(0, 2),
        markers=(),
        bos_token_id=1,
        missing=(),
    )
    return Structure(**{**values, **fields})


def names(groups):
    """The group of each position, by its first letters."""
    assert sum(member.int() for member in groups.values()).tolist() == [[1] * groups["text"].shape[1]]
    return " ".join(
        next(name for name in GROUPS if groups[name][0, place])[:3] for place in range(groups["text"].shape[1])
    )


def test_groups_of_a_padded_prompt():
    ids, mask = torch.tensor([[1, 1, 1, 5, 9, 9, 9, 6, 1, 7, 8]]), torch.tensor([[0, 0, *[1] * 9]])
    hidden = torch.arange(22.0).view(1, 11, 2)
    prompt = Prompt({"input_ids": ids, "attention_mask": mask}, torch.tensor([TEXT] * 10 + [TEMPLATE]))
    structure = structure_with(newlines=hidden[0, 5:6].clone(), markers=(7,))
    groups = group_tokens(structure, prompt, hidden)
    assert names(groups) == "pad pad bos tex vis new vis tex tex tem tem"


def test_groups_where_the_model_itself_puts_the_visual_tokens_in():
    ids = torch.tensor([[1, 5, -200, 6, 7]])
    prompt = Prompt({"input_ids": ids}, torch.tensor([TEMPLATE, SYSTEM, TEMPLATE, TEXT, TEMPLATE]))
    groups = group_tokens(structure_with(placeholders=(-200,)), prompt, torch.ones(1, 8, 2))
    assert names(groups) == "bos sys vis vis vis vis tex tem"


def test_a_prompt_without_an_image():
    prompt = Prompt({"input_ids": torch.tensor([[1, 5, 6]])})
    assert names(group_tokens(structure_with(), prompt, torch.ones(1, 3, 2))) == "bos tex tex"


def test_a_tiny_llava():
    model, processor = tiny.stock_llava(), tiny.processor()
    prompt = make_prompt(processor, "what is a cat", tiny.photo(), model.device, model.dtype)
    structure = find_structure(model, prompt.inputs)
    assert structure.placeholders == (tiny.IMAGE_TOKEN_ID,)
    assert structure.projector_name == "model.multi_modal_projector"
    assert structure.projector is model.model.multi_modal_projector
    assert structure.layers is model.model.language_model.layers
    hidden = model(**prompt.inputs, output_hidden_states=True).hidden_states[0]
    # USER: <image> x 4 what is a cat ASSISTANT:
    assert names(group_tokens(structure, prompt, hidden)) == "tem vis vis vis vis tex tex tex tex tem"
