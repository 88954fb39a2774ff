"""Test sets and when an answer is right."""

import json
from collections import Counter

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.matching import chosen, is_right, normalise
from llava_norm_align.evaluation.tasks import load_easy_vqa, load_tasks
from tests.helpers import tiny


def entry(id="0", question="what is it ?", answer="cat", image="0.png", **fields):
    value = question if image is None else f"<image>\n{question}"
    turns = [{"from": "human", "value": value}, {"from": "gpt", "value": answer}]
    return {"id": id, "conversations": turns} | ({"image": image} if image else {}) | fields


@pytest.fixture
def write(tmp_path):
    """Write rows beside an image, or text as it is; the path as --tasks takes it."""
    tiny.photo(0).save(tmp_path / "0.png")

    def written(*rows, name="cats.json", text=None):
        (tmp_path / name).write_text(json.dumps(rows) if text is None else text)
        return str(tmp_path / name)

    return written


def test_easy_vqa_has_its_three_types():
    rows = load_easy_vqa()
    # counted with collections.Counter over easy_vqa.get_test_questions()
    assert Counter(row.type for row in rows) == {"yes/no": 7136, "shape": 1257, "colour": 1280}
    assert len({row.id for row in rows}) == 9673
    assert (rows[0].prompt, rows[0].answer, rows[0].type) == ("what is the red shape?", "triangle", "shape")
    assert rows[1].type == "colour" and rows[3].type == "yes/no" and rows[11].image.name == "1.png"


def test_rows_of_a_file(write, tmp_path):
    rows = [
        entry(),
        entry("1", answer="3.5", match="exact", type="number"),
        entry("2", "which ?", "B", image=None, choices=["cat", "dog"]),
        entry(3, "which ?", "cat", choices=["cat", "dog"]),
    ]
    [task] = load_tasks([write(*rows)])
    assert task.name == "cats" and [row.id for row in task.rows] == ["0", "1", "2", "3"]
    assert [row.match for row in task.rows] == ["normalised", "exact", "choice", "choice"]
    assert [row.type for row in task.rows] == [None, "number", None, None]
    assert [row.image for row in task.rows] == [tmp_path / "0.png", tmp_path / "0.png", None, tmp_path / "0.png"]
    assert task.rows[0].prompt == "what is it ?"
    options = "A. cat\nB. dog\nAnswer with the option's letter from the given choices directly."
    assert task.rows[2].prompt == f"which ?\n{options}"
    assert [row.id for row in load_tasks([write(*rows)], limit=2)[0].rows] == ["0", "1"]
    both = load_tasks([f"easy-vqa,{write(*rows)}"], limit=3)
    assert [(task.name, len(task.rows)) for task in both] == [("easy-vqa", 3), ("cats", 3)]


def test_the_digest_tells_test_sets_apart(write, tmp_path):
    def digest(*rows, **options):
        return load_tasks([write(*rows)], **options)[0].sha256

    first = digest(entry(), entry("1"))
    assert digest(entry(), entry("1")) == first
    assert first not in {digest(entry(), entry("1", answer="dog")), digest(entry(), entry("1"), limit=1)}
    (tmp_path / "other").mkdir()
    tiny.photo(0).save(tmp_path / "other" / "0.png")
    assert digest(entry(), entry("1"), images=tmp_path / "other") == first  # the same picture elsewhere
    tiny.photo(1).save(tmp_path / "0.png")
    assert digest(entry(), entry("1")) != first


BAD_ROWS = {
    "two turns": (entry(conversations=[]), "no turns"),
    "four turns": (entry(conversations=entry()["conversations"] + entry(image=None)["conversations"]), "4 turns"),
    "image twice": (entry(question="<image> what ?"), "2 <image>"),
    "no question": (entry(question=""), "question is empty"),
    "no answer": (entry(answer=" "), "empty"),
    "type": (entry(type=3), "type is 3"),
    "match": (entry(match="fuzzy"), "match is 'fuzzy', but exact or normalised"),
    "article": (entry(answer="The"), "only articles and punctuation"),
    "both": (entry(answer="A", match="exact", choices=["a", "b"]), "both match and choices"),
    "one choice": (entry(answer="A", choices=["a"]), "1 choices"),
    "choices": (entry(answer="A", choices=["a", 1]), "no list of texts"),
    "same choices": (entry(answer="A", choices=["cat", "cat"]), "are the same"),
    "no such choice": (entry(answer="C", choices=["cat", "dog"]), "neither the letter nor the text"),
}


@pytest.mark.parametrize("row, message", BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named(write, row, message):
    with pytest.raises(InputError, match=message) as told:
        load_tasks([write(entry("first"), row)])
    assert "Row 1 of" in str(told.value) and "cats.json" in str(told.value)


def test_bad_calls(write, tmp_path):
    def refused(message, *names, **options):
        with pytest.raises(InputError, match=message):
            load_tasks(names, **options)

    refused(r"easy_vqa, which is not known. Name easy-vqa, .* Did you mean easy-vqa\?", "easy_vqa")
    refused("nlvr, which is not known. Name easy-vqa, a JSON file", "nlvr")
    refused("names no test set")
    refused("is not there", str(tmp_path / "none.json"))
    refused("empty list", write(text="[]"))
    refused("JSON lines", write(text=json.dumps(entry()) + "\n" + json.dumps(entry("1"))))
    refused("The id 0 occurs 2 times", write(entry(), entry("1"), entry()))
    refused("The id 7 occurs 2 times", write(entry(7), entry("7")))
    refused(
        r"2 rows .* not there, such as .*1.png \(id 1\)",
        write(entry(), entry("1", image="1.png"), entry("2", image="2.png")),
    )
    refused("not a folder", write(entry()), images=tmp_path / "none")
    refused("--limit is 0", write(entry()), limit=0)
    (tmp_path / "sub").mkdir()
    refused("two test sets called cats", write(entry()), write(entry(image=None), name="sub/cats.json"))


@pytest.mark.parametrize(  # SQuAD's rule, by hand
    ("text", "expected"),
    [
        (" The red  Cat. ", "red cat"),
        ("a theatre, an anthem", "theatre anthem"),
        ("It's 3.5!", "its 35"),
        ("A.", ""),
        ("red..", "red"),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        *[
            (said, "B")
            for said in ("B", "b", " (B) ", "B.", "B)", "B: dog", "B. a cat", "(b) dog", "Answer: B", "B\nFor")
        ],
        *[(said, "B") for said in ("The answer is B.", "The correct answer is (B).", "Option B", "dog", "The dog.")],
        *[(said, "A") for said in ("A", "a cat", "A cat.")],
        *[(said, None) for said in ("D", "A dog and a cat", "Because", "", ".", "I", "Beta", "(B", "cats")],
        ("it is A", "C"),
    ],
)
def test_chosen(said, letter):
    assert chosen(said, ["cat", "dog", "it is a"]) == letter


def test_is_right():
    assert is_right(" Red cat\n", "Red cat", "exact") and not is_right("red cat", "Red cat", "exact")
    assert is_right("A red cat!", "red cat", "normalised") and not is_right("dark red cat", "red cat", "normalised")
    assert is_right("B", "dog", "choice", ["cat", "dog"]) and is_right("dog", "B", "choice", ["cat", "dog"])
    assert not is_right("fish", "B", "choice", ["cat", "dog"])
