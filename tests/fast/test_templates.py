"""Chat templates for training: byte for byte what the original renders, answers and their end of turn marked."""

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.micro import CHAT_TEMPLATE
from llava_norm_align.conversion.processor_files import VICUNA_TEMPLATE
from llava_norm_align.data import templates
from llava_norm_align.data.templates import FLATTEN_PARTS, leading_bos, render, training_template
from tests.helpers import tiny

# LLaVA-1.5's conversation "v1", from its rules: system prompt, then " "; questions end in " ", answers in "</s>".
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# SmolLM2-135M-Instruct's, as its publisher wrote it (the field tokenizer.chat_template of its GGUF file).
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# llava-hf/llava-1.5-7b-hf's: it marks answers without an end of turn, and renders none
LLAVA_HF = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def processor(template=None, *special):
    made = tiny.processor()
    made.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", *special]})
    made.chat_template = template
    return made


def user(text, image=False):
    return {"role": "user", "content": [{"type": "image"}] * image + [{"type": "text", "text": text}]}


def assistant(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def system(text):
    return {"role": "system", "content": [{"type": "text", "text": text}]}


SINGLE = [user("What is it?", image=True), assistant("A cat.")]
MULTI = [*SINGLE, user("Its colour?"), assistant("Red.\nVery red.")]
LATER = [user("Hello."), assistant("Hi."), user("What is it?", image=True), assistant("A cat.")]
TEXT = [user("Who are you?"), assistant("A model.")]


@pytest.mark.parametrize(
    ("messages", "expected", "answers"),
    [
        (SINGLE, f"{SYSTEM} USER: <image>\nWhat is it? ASSISTANT: A cat.</s>", [" A cat.</s>"]),
        (
            MULTI,
            f"{SYSTEM} USER: <image>\nWhat is it? ASSISTANT: A cat.</s>"
            "USER: Its colour? ASSISTANT: Red.\nVery red.</s>",
            [" A cat.</s>", " Red.\nVery red.</s>"],
        ),
        (
            LATER,
            f"{SYSTEM} USER: Hello. ASSISTANT: Hi.</s>USER: <image>\nWhat is it? ASSISTANT: A cat.</s>",
            [" Hi.</s>", " A cat.</s>"],
        ),
        (TEXT, f"{SYSTEM} USER: Who are you? ASSISTANT: A model.</s>", [" A model.</s>"]),
        ([system("Be brief."), *TEXT], "Be brief. USER: Who are you? ASSISTANT: A model.</s>", [" A model.</s>"]),
        ([user("Who?")], f"{SYSTEM} USER: Who? ", []),
    ],
)
def test_vicuna_v1_is_llavas_conversation(messages, expected, answers):
    made = processor()
    assert render(training_template(made, "vicuna_v1"), made, messages) == (expected, answers)


def test_vicuna_v1_asks_up_to_the_colon():
    made = processor()
    text, _ = render(training_template(made, "vicuna_v1"), made, [user("Who?")], add_generation_prompt=True)
    assert text == f"{SYSTEM} USER: Who? ASSISTANT:"


@pytest.mark.parametrize("messages", [TEXT, [system("Be brief."), *TEXT], [*TEXT, *TEXT], [user(" x \n")]])
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_renders_as_the_original(messages, prompt):
    made = processor()
    strings = [{"role": message["role"], "content": message["content"][0]["text"]} for message in messages]
    expected, _ = render(SMOLLM2, made, strings, prompt)
    template = training_template(processor(None, "<|im_end|>"), "smollm2")
    for content in (strings, messages):
        text, answers = render(template, made, content, prompt)
        assert text == expected
        assert answers == ["A model.<|im_end|>"] * sum(message["role"] == "assistant" for message in messages)


def test_smollm2_puts_the_image_on_a_line_before_the_text():
    text, answers = render(training_template(processor(None, "<|im_end|>"), "smollm2"), processor(), LATER)
    assert text.endswith("<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n")
    assert answers == ["Hi.<|im_end|>", "A cat.<|im_end|>"]


def test_micro_llava_has_the_smollm2_template():
    assert training_template(processor(CHAT_TEMPLATE, "<|im_end|>")) == CHAT_TEMPLATE


def test_a_language_models_own_template_gets_ours():
    template = training_template(processor(FLATTEN_PARTS + SMOLLM2, "<|im_end|>"))
    assert template == (templates.FOLDER / "smollm2.jinja").read_text()
    assert training_template(processor(FLATTEN_PARTS + VICUNA_TEMPLATE)) == FLATTEN_PARTS + VICUNA_TEMPLATE


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "llama3_2", "qwen2_5"])
@pytest.mark.parametrize("messages", [SINGLE, MULTI, LATER, TEXT, [system("Be brief."), *MULTI]])
def test_published_templates_are_marked(name, messages):
    trl = pytest.importorskip("trl.chat_template_utils")
    original = FLATTEN_PARTS + getattr(trl, f"{name}_chat_template")
    end = "<|eot_id|>" if name.startswith("llama") else "<|im_end|>"
    made = processor(original, end, "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>")
    template = training_template(made)
    text, answers = render(template, made, messages)
    assert text == render(original, made, messages)[0]
    expected = [message["content"][0]["text"] + end for message in messages if message["role"] == "assistant"]
    assert [answer.strip() for answer in answers] == expected


def test_a_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(FLATTEN_PARTS + VICUNA_TEMPLATE)
    assert training_template(processor(), path) == path.read_text()


def bad_template(text, *words, choice=None):
    with pytest.raises(InputError) as caught:
        training_template(processor(text), choice)
    for word in (*words, "--chat_template_path"):
        assert word in str(caught.value)


def test_a_marked_form_that_renders_otherwise_is_not_taken():
    trl = pytest.importorskip("trl.chat_template_utils")  # whose form of Qwen3's puts empty thoughts into each turn
    with pytest.raises(InputError, match="no marked form that renders the same is known"):
        training_template(processor(FLATTEN_PARTS + trl.qwen3_chat_template, "<|im_end|>"))


def test_templates_that_cannot_train():
    bad_template(None, "no chat template", "vicuna_v1")
    bad_template(
        "{% for m in messages %}{{ m['role'] }}<image>{% endfor %}", "{% generation %}", "chat_template.jinja"
    )
    bad_template(LLAVA_HF, "no end of turn", "vicuna_v1")
    bad_template(None, "<|im_end|>", "not a special token", choice="smollm2")
    bad_template(VICUNA_TEMPLATE, "cannot be rendered")
    no_image = VICUNA_TEMPLATE.replace("message['content']", "message['content'][-1]['text']")
    bad_template(no_image, "shows 0 <image>")
    bad_template((FLATTEN_PARTS + VICUNA_TEMPLATE).replace("{% generation %}", "{% generation %}So: "), "marks 2")
    bad_template(None, "no chat template file", "vicuna_v1, smollm2", choice="vicuna")


def test_bos_is_added_where_the_tokenizer_adds_it():
    from tokenizers.processors import TemplateProcessing

    made = processor()
    assert leading_bos(made) == ""
    made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    assert leading_bos(made) == "<s>"
    assert leading_bos(made, "<s>USER:") == ""


@pytest.mark.parametrize("name", ["vicuna_v1", "smollm2"])
def test_a_processor_keeps_the_template_without_marks(name):
    marked = (templates.FOLDER / f"{name}.jinja").read_text()
    plain = templates.without_marks(marked)
    assert "generation %}" in marked and "generation %}" not in plain
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What? "}]},
        {"role": "assistant", "content": [{"type": "text", "text": " A cat. \n"}]},
    ] * 2
    processor = tiny.processor()
    for messages, prompt in ((turns, False), (turns[:3], True)):
        text, spans = templates.render(marked, processor, messages, prompt)
        assert templates.render(plain, processor, messages, prompt) == (text, []) and spans
