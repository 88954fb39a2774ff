"""See: diagnosis's numbers and plots for one picture, and the words around them.

Not among the fast tests, some of which fork: models that computed in threads would block the child.
"""

import json
import re
import shutil
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from PIL import Image

pytest.importorskip("gradio")

from llava_norm_align.diagnosis import plots
from llava_norm_align.diagnosis.diagnose import diagnose_model
from llava_norm_align.space import figures, see, words
from llava_norm_align.space.compare import NO_ALIGNED, NO_EVALUATION, NO_TRAINING, UNREADABLE, compare
from llava_norm_align.space.desk import Desk
from llava_norm_align.space.settings import Settings
from tests.helpers import release_card, space, tiny

QUESTION = "what is in the picture ?"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def models(root):
    return space.load(root)


@pytest.fixture(scope="module")
def results(models, root):
    return see.measure(models, str(root / "0.png"), QUESTION)


def test_the_numbers_are_those_of_a_diagnosis(models, results, root):
    for shown, result in zip(models, results, strict=True):
        expected = diagnose_model(shown.model, shown.processor, [root / "0.png"], name=shown.name, question=QUESTION)
        for key in ("norms", "ratio", "layers", "attention"):
            assert result[key] == expected[key]
    first, second = see.numbers(results)
    assert (first["model"], second["model"], first["question"]) == ("base", "aligned", QUESTION)
    assert first["norms"]["visual"]["mean"] != second["norms"]["visual"]["mean"]
    assert str(root) not in str([first, second]) and "0.png" not in str([first, second])


def test_the_table_shows_them(results):
    table = see.table(results)
    for result in results:
        assert plots.number(result["norms"]["visual"]["mean"]) in table
    assert table.count("<tr>") == 7
    assert "<script>" not in see.table([result | {"model": {"name": "<script>"}} for result in results])


def test_every_plot_is_drawn_as_svg_of_its_own(models, results, root):
    drawn = see.draw(models, results, Image.open(root / "0.png").convert("RGB"))
    assert list(drawn) == ["norms", "layers", "rotation", "shares", "attention"]
    ids = []
    for figure in drawn.values():
        tree = ElementTree.fromstring(figure)
        ids += [node.get("id") for node in tree.iter() if node.get("id")]
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', figure)
        assert used and set(used) <= set(ids)
        assert (
            "var(--plot-ink)" in figure
            and "#222222" not in figure
            and "http" not in figure.replace("http://www.w3.org", "")
        )
    assert len(ids) == len(set(ids))  # on one page, too
    page = words.plots(drawn, 2)
    assert all(f"plot-{name}" in page for name in drawn) and "dashed" in page
    assert "dashed" not in words.plots(drawn, 1).lower() + words.legend(1).lower()


def test_the_lines_of_a_plot_are_the_numbers(results):
    figure = plots.draw_layers(results, "rotation_degrees", "rotation (degrees)")
    lines = [line.get_ydata() for line in figure.axes[0].get_lines()]
    expected = [
        [layer[kind]["rotation_degrees"] for layer in result["layers"]] for result in results for kind in plots.KINDS
    ]
    assert [list(line) for line in lines] == expected


def test_the_map_lies_over_what_the_model_sees():
    image = Image.new("RGB", (52, 40), "white")
    image.paste("red", (6, 0, 46, 40))
    part = figures.seen_part(image, tiny.processor())  # scales the short side, then crops the middle
    assert part.size == (40, 40) and part.getcolors() == [(1600, (255, 0, 0))]
    assert figures.seen_part(image, tiny.processor("clip", "llava_next")) is None
    square = SimpleNamespace(image_processor=SimpleNamespace(size={"height": 28, "width": 28}, do_center_crop=None))
    assert figures.seen_part(image, square) is image


def test_the_history_shows_what_was_typed_as_text(models):
    entry = {
        "question": "<img src=x onerror=alert(1)>",
        "answers": ["<b>", "&"],
        "picture": "data:image/jpeg;base64,x",
    }
    page = words.history([entry], models)
    assert "<img src=x" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<td>&lt;b&gt;</td><td>&amp;</td>" in page
    assert words.history([], models) == ""


def test_the_head_says_what_is_shown(models):
    assert "no record of a training" in words.head(models)
    assert "cannot show what norm alignment changes" in words.head(models[:1])
    assert "no base to compare it with" in words.head(models[1:])


def test_one_model_makes_one_column(root):
    desk = Desk(space.load(root, "base"), Settings())
    assert len(list(desk.ask(desk.accept(str(root / "0.png"), QUESTION, 3, 0)))[-1]) == 1
    table, drawn, numbers = desk.see(str(root / "0.png"), QUESTION)
    assert len(numbers) == 1 and table.count("<th>") == 8 and "plot-norms" in drawn
    assert desk.compare() == (NO_ALIGNED, "")


def test_results_are_shown_where_they_lie_in_the_folder(root, models):
    assert compare(models) == (NO_EVALUATION, f"<h3>Training</h3><p>{NO_TRAINING}</p>")
    folder = root / "aligned"
    release_card.add_evaluation(folder)
    release_card.add_training(folder)
    evaluation, curves = compare(models)
    assert (
        evaluation.startswith("*This model* is aligned.")
        and "75.00 (25.00 to 95.00)" in evaluation
        and "not resolved" in evaluation
    )
    assert "annika" not in evaluation + curves and "](" not in evaluation
    assert "<svg" in curves and "var(--plot-ink)" in curves and "30 steps" in curves
    assert "#ffffff" not in curves and "#222222" not in curves  # whose colours follow the page's
    (folder / "norm_align" / "evaluation.json").write_text("{")
    assert "cannot be read" in compare(models)[0] and str(root) not in compare(models)[0]


@pytest.mark.parametrize("change", [{"steps": None}, {"steps": "<b>"}, {"history": "x"}, {"history": [1]}])
def test_a_training_record_of_another_hand_is_told(change, root, tmp_path):
    shutil.copytree(root / "aligned", tmp_path / "aligned")
    release_card.add_training(tmp_path / "aligned")
    path = tmp_path / "aligned/norm_align/training.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    shown = space.load(tmp_path, "aligned")
    assert compare(shown) == (UNREADABLE, "")
