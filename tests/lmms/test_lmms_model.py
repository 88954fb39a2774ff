"""The class that lmms-eval calls: its answers and likelihoods, one request at a time, by transformers' own loop."""

import pytest
from lmms_eval.api.instance import Instance
from PIL import Image

from llava_norm_align.evaluation.lmms_model import LONGEST, LlavaNormAlign, cut, generation_options
from tests.helpers import lmms, tiny
from tests.helpers.answers import prompt_of

IMAGES = [[], [0], [1], [2, 3], [4]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    lmms.build(root)
    return root


@pytest.fixture(params=["aligned, mine", "stock"])
def both(request, root):
    """The class with the model, and the model as it was before it was saved."""
    lm = LlavaNormAlign(str(root / request.param), device="cpu", batch_size="3")
    lm.task_dict = {"task": {"test": [[tiny.photo(number) for number in numbers] for numbers in IMAGES]}}
    return lm, lmms.models()[request.param]


def request(kind, row, context, second, visual=lambda doc: doc):
    metadata = {"task": "task", "doc_id": row, "repeats": 1}
    arguments = (context, second, visual, row, "task", "test")
    return Instance(request_type=kind, arguments=arguments, idx=0, metadata=metadata)


def said(model, text, images, tokens):
    """Greedy, one question, no padding."""
    processor = tiny.processor()
    pictures = {"images": images} if images else {}
    inputs = processor(text=text, **pictures, return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


def test_answers_with_none_one_and_several_images(both):
    lm, model = both
    question = "what is in the picture ?"
    texts = [prompt_of(question, image=bool(numbers)) for numbers in IMAGES]
    contexts = [question] * len(IMAGES)
    contexts[3] = "is <image> a <image> cat"  # the places of its two images
    texts[3] = "USER: is <image> a <image> cat ASSISTANT:"
    lengths = [4, 4, 6, 4, 6]
    requests = [
        request("generate_until", row, context, {"max_new_tokens": length, "temperature": 0, "do_sample": False})
        for row, (context, length) in enumerate(zip(contexts, lengths, strict=True))
    ]
    expected = [
        said(model, text, [tiny.photo(number) for number in numbers], length)
        for text, numbers, length in zip(texts, IMAGES, lengths, strict=True)
    ]
    assert lm.generate_until(requests) == expected
    assert len(set(expected)) > 2 and all(expected)


def test_an_image_without_a_place_comes_first(both):
    lm, model = both
    text = "USER: <image> is <image> a cat ASSISTANT:"
    asked = request("generate_until", 3, "is <image> a cat", {"max_new_tokens": 4})
    assert lm.generate_until([asked]) == [said(model, text, [tiny.photo(2), tiny.photo(3)], 4)]


def test_an_answer_ends_before_until(both):
    lm, model = both
    whole = said(model, prompt_of("red"), [tiny.photo(0)], 6)
    stop = whole.split()[-1]
    asked = request("generate_until", 1, "red", {"max_new_tokens": 6, "until": ["nowhere", stop]})
    assert lm.generate_until([asked]) == [whole[: whole.index(stop)].strip()]


def test_loglikelihood_is_the_loss_of_the_continuation(both):
    lm, model = both
    processor = tiny.processor()
    rows = [(row, text) for row in range(len(IMAGES)) for text in (" a cat", " red")]
    greedy = " " + said(model, prompt_of("red"), [tiny.photo(0)], 3)
    rows.append((1, greedy))
    found = lm.loglikelihood([request("loglikelihood", row, "red", text) for row, text in rows])
    for (row, text), scored in zip(rows, found, strict=True):
        images = [tiny.photo(number) for number in IMAGES[row]]
        loss, is_greedy = lmms.loss_of(model, processor, "red", images, text)
        assert scored.text == (pytest.approx(loss, rel=1e-4), is_greedy)
    assert found[-1].text[1] and not found[0].text[1]


def test_a_continuation_may_come_from_the_question(both):
    lm, model = both
    asked = request("loglikelihood", 1, "red", lambda doc: " a cat" * len(doc))
    loss, _ = lmms.loss_of(model, tiny.processor(), "red", [tiny.photo(0)], " a cat")
    assert lm.loglikelihood([asked])[0].text[0] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("context", "options", "visual", "message"),
    [
        ("red", {}, lambda doc: ["film.mp4"], "has a str where an image was expected; video"),
        ("red", {}, lambda doc: [{"array": [0]}], "has a dict where"),
        ("a <image> <image> cat", {}, lambda doc: doc, "has 2 places for images .* but 1 images"),
        ("a <image> cat", {}, lambda doc: [], "has 1 places for images .* but 0 images"),
        ("red", {"stop": 1, "max_new_tokens": 1}, lambda doc: doc, "asks for generation with stop, which"),
        ("red", {}, lambda doc: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_answered_ends_the_run(both, context, options, visual, message):
    lm, _ = both
    with pytest.raises(SystemExit, match=message):
        lm.generate_until([request("generate_until", 1, context, options, visual)])


def test_several_rounds_are_refused(both):
    lm, _ = both
    with pytest.raises(SystemExit, match="NotImplementedError: .* one question at a time"):
        lm.generate_until_multi_round([request("generate_until_multi_round", 1, "red", {})])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (LONGEST, [], {})),
        ({"max_new_tokens": 8, "until": "\n", "temperature": 0, "top_p": 1.0}, (8, ["\n"], {})),
        ({"do_sample": True, "temperature": 0}, (LONGEST, [], {})),
        ({"do_sample": False, "temperature": 0.7, "num_beams": 2}, (LONGEST, [], {"num_beams": 2})),
        ({"temperature": 0.7, "top_p": None}, (LONGEST, [], {"do_sample": True, "temperature": 0.7})),
        ({"do_sample": True, "top_k": 3, "image_aspect_ratio": "pad"}, (LONGEST, [], {"do_sample": True, "top_k": 3})),
    ],
)
def test_generation_is_what_the_task_asks_for(asked, expected):
    assert generation_options(asked) == expected


def test_beams_and_sampling_reach_generate(both):
    lm, model = both
    processor = tiny.processor()
    inputs = processor(text=prompt_of("red"), images=[tiny.photo(0)], return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, num_beams=3, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
    asked = [request("generate_until", 1, "red", {"max_new_tokens": 6, "num_beams": 3})]
    assert lm.generate_until(asked) == [processor.tokenizer.decode(ids, skip_special_tokens=True).strip()]
    hot = request("generate_until", 1, "red", {"max_new_tokens": 6, "temperature": 50.0})
    assert len({lm.generate_until([hot])[0] for _ in range(4)}) > 1


def test_cut():
    assert cut("one\n\ntwo END", ["END", "\n\n"]) == "one"
    assert cut("one two", ["", "three"]) == "one two"


def test_an_image_is_put_into_rgb(both):
    lm, _ = both
    grey = tiny.photo(0).convert("L")
    ways = [lambda doc: [grey], lambda doc: [grey.convert("RGB")]]
    answers = [lm.generate_until([request("generate_until", 1, "red", {"max_new_tokens": 4}, way)]) for way in ways]
    assert answers[0] == answers[1] and isinstance(grey, Image.Image)
