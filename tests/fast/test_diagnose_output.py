"""What a diagnosis prints, and its Markdown."""

import functools
import json
import math
import operator
import re

import pytest
from markdown_it import MarkdownIt

from llava_norm_align.diagnosis.compare import compare
from llava_norm_align.diagnosis.describe import describe, first_table, later_tables
from llava_norm_align.diagnosis.formats import escape, markdown_table, number, without_nan
from llava_norm_align.diagnosis.markdown import markdown
from tests.helpers import diagnosis_result

PLOTS = ["layer0_norms.png", "norms_by_layer.png", "cosine_by_layer.png", "attention_map.png"]

each_result = pytest.mark.parametrize("make", [diagnosis_result.full, *diagnosis_result.REDUCED.values()])


def test_first_table_has_the_norms_beside_the_paper():
    table = first_table(diagnosis_result.full())
    assert diagnosis_result.row(table, "visual, layer 0") == "6,912 41.08 44.40 28.10 9.32 212.7 468.2 0.2 %".split()
    assert diagnosis_result.row(table, "encoder features") == (
        "6,912 30.11 17.02 26.40 14.20 88.80 131.5 0.1 % 28.71 +- 16.87".split()
    )
    assert diagnosis_result.row(table, "text, layer 0")[-1] == "1.08" and diagnosis_result.row(
        table, "projector output"
    )[-3:] == [
        "39.96",
        "+-",
        "45.58",
    ]
    assert "newline, layer 0" not in table  # there are none
    joined = " ".join(table.split())
    assert (
        "visual / text: 38.29 (95 % interval over images, for this prompt, 36.10 to 40.60); of the medians 26.43"
        in joined
    )
    assert "LLaVA-v1.5; projector output / text there 37 (which size of the model" in joined
    assert "mean norm 1.0432 (the paper's T)" in joined
    assert "visual, layer 0: 2 tokens with NaN or inf" in joined and "5 near-constant tokens" in joined


def test_first_table_needs_only_what_is_known_first():
    assert first_table(diagnosis_result.first_part()) == first_table(diagnosis_result.full())


def test_a_large_share_of_fp16_is_told():
    result = diagnosis_result.changed(("norms", "projector_output", "fp16_share"), 0.75)
    assert "Note: projector output: the largest element is 75 % of fp16's limit, 65504" in first_table(result)


def test_layer_rows():
    text = later_tables(diagnosis_result.full())
    expected = "41.08 1.07 5.13 4.97 0.993 0.172 6.7 80.1 7.0 77.7 1.03 yes -3.9 yes"
    assert diagnosis_result.row(text, "0 ") == expected.split()
    assert diagnosis_result.row(text, "1*")[-4:] == ["0.514", "no", "-9.9", "no"]  # DeepStack
    assert diagnosis_result.row(text, "2 ")[-4:] == ["0.762", "?", "-15.5", "no"]
    assert "*: after this layer the model adds visual features" in text


def test_many_layers_have_a_row_each():
    lines = later_tables(diagnosis_result.with_layers(30)).splitlines()
    assert [line.split()[0].rstrip("*") for line in lines if re.match(r"\d+\*? +\d", line)][:30] == [
        str(layer) for layer in range(30)
    ]


def test_verdicts_in_words():
    result = diagnosis_result.full()
    result["verdicts"]["a1"] = {"holds": 3, "fails": 25, "undecided": 2, "none": 0}
    result["verdicts"]["a2"] = {"holds": 0, "fails": 27, "undecided": 2, "none": 1}
    text = later_tables(result)
    assert "A1 (equal mean update norms): holds at 3, fails at 25, undecided at 2 of 30 layers" in text
    assert (
        "A2 (equal mean update angles): holds at 0, fails at 27, undecided at 2, no verdict at 1 of 30 layers" in text
    )
    for text in (describe(diagnosis_result.few_images()), markdown(diagnosis_result.few_images())):
        assert "A1 (equal mean update norms): no verdict under 8 images (3 measured)" in text
        assert "A2 (equal mean update angles): no verdict under 8 images (3 measured)" in text


def test_where_visual_tokens_turn_less():
    result = diagnosis_result.full()
    angles = [(5.0, 80.0, 6.0, 70.0), (9.0, 8.0, 6.0, 7.0), (4.0, 8.0, 9.0, 7.0), (8.0, 8.0, 7.0, 7.0)]
    for layer, (visual, text, visual_predicted, text_predicted) in zip(result["layers"], angles, strict=True):
        layer["visual"] |= {"rotation_degrees": visual, "rotation_predicted_degrees": visual_predicted}
        layer["text"] |= {"rotation_degrees": text, "rotation_predicted_degrees": text_predicted}
    assert (
        "Visual tokens turn less than text tokens at 2 of 4 layers; the paper's theory predicts it from the norms at "
        "2, of which it is measured at 1"
    ) in " ".join(later_tables(result).split())


def test_controls_attention_and_probe():
    text = later_tables(diagnosis_result.full())
    assert diagnosis_result.row(text, "12 images") == "41.08 1.07 6.7 80.1".split()
    assert diagnosis_result.row(text, "blank image (8 runs)") == "33.33 1.07 7.8 80.3".split()
    assert diagnosis_result.row(text, "text only (1 prompt)") == "- 1.07 - 81.3".split()
    joined = " ".join(text.split())  # (52.1 + 11.3 + 8.07 + 3.44) / 4
    assert (
        "to the image: 18.7 %, mean over heads, layers and 8 images; visual tokens are 92.4 % of all tokens" in joined
    )
    assert "by layer, %: 52.1 11.3 8.1 3.4" in text
    assert diagnosis_result.row(text, "0.500 ") == "20.54 0.713 0.410 to 1.22 75.0 %".split()
    assert diagnosis_result.row(text, "0.0261 = ") == "1.07 7.94 5.30 to 9.90 12.5 %".split()


def test_missing_is_told_once():
    result = diagnosis_result.full()
    result["missing"].append("The text-only control failed.")
    assert describe(result).count("No newline token was found") == 1
    rest = later_tables(result, told=result["missing"][:1])
    assert "No newline token" not in rest and "Missing: The text-only control failed." in rest
    assert "contested" in rest


def test_tables_fit_the_terminal():
    result = diagnosis_result.with_layers(120)
    result["model"]["name"] = "/data/" + "very-long-name-" * 20
    result["missing"] = ["A sentence that is long. " * 20]
    for wild in (1.23e38, 1.23e-9, 99999.4):
        for layer in result["layers"]:
            for kind in ("visual", "text"):
                layer[kind] |= {"hidden_norm": wild, "update_norm": wild}
            layer["a1"]["ratio"], layer["a2"]["difference_degrees"] = wild, -179.96
        for statistics in filter(None, result["norms"].values()):
            statistics |= {"mean": abs(wild), "std": abs(wild), "max": abs(wild), "p99": abs(wild), "n": 99_999_999}
        text = describe(result) + compare(result, result)
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (-math.inf, "-"),
        (0, "0"),
        (3.2022, "3.20"),
        (41.08, "41.08"),
        (117.96, "118.0"),
        (3484.24, "3484"),
        (65504, "65504"),
        (123456.0, "1.2e+05"),
        (0.0133, "0.0133"),
        (0.0001, "1.0e-04"),
        (-0.5, "-0.500"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@each_result
def test_reduced_results_give_tables(make):
    result = make()
    for text in (describe(result), markdown(result), compare(result, diagnosis_result.full())):
        assert not re.search(r"\b(nan|None|inf)\b", text.replace("NaN or inf", ""))
    json.dumps(result, allow_nan=False)


def test_nothing_raises_whatever_is_null():
    never = {"versions", "names", "missing"}  # theirs is no null
    for path in diagnosis_result.paths(diagnosis_result.FULL):
        result = diagnosis_result.changed(path, None)
        for text in (describe(result), markdown(result), compare(result, result)):
            assert text and ("None" not in text or never & set(path)), path


def test_no_nan_in_tables():
    for path in diagnosis_result.paths(diagnosis_result.FULL):
        result = diagnosis_result.changed(path, math.nan)
        if path[-1] != "layer" and isinstance(functools.reduce(operator.getitem, path, diagnosis_result.FULL), float):
            for text in (describe(result), markdown(result), compare(result, result)):
                assert not re.search(r"\bnan\b", text), path


def test_no_nan_in_json():
    result = diagnosis_result.changed(("layers", 1, "visual", "update_norm"), math.nan)
    result["ratio"]["interval"] = (1.0, -math.inf)
    cleaned = json.loads(json.dumps(without_nan(result), allow_nan=False))
    assert cleaned["layers"][1]["visual"]["update_norm"] is None and cleaned["ratio"]["interval"] == [1.0, None]
    expected = diagnosis_result.full()
    expected["layers"][1]["visual"]["update_norm"], expected["ratio"]["interval"] = None, [1.0, None]
    assert cleaned == expected


def test_terminal_shows_no_control_characters():
    result = diagnosis_result.full()
    result["model"]["name"] = "a\x1b[31mb\nc\u202ed"
    result["missing"] = ["one\x07\rtwo"]
    text = describe(result)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", text) and text.startswith("a [31mb cd: Llava")


# Markdown


def render(text):
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)


def test_markdown_for_a_model_card():
    text = markdown(diagnosis_result.full(), PLOTS)
    html = render(text)
    assert re.findall(r"<h(\d)>(.*?)</h\d>", html) == [
        ("2", "Norm gap of llava-hf/llava-1.5-7b-hf"),
        *(("3", name) for name in ("Norms", "Layers", "Controls", "Attention", "Probe without training")),
        *(("3", name) for name in ("Not measured", "How it was measured")),
    ]
    assert sorted(re.findall(r'<img src="(.*?)"', html)) == sorted(PLOTS)
    assert re.findall(r'<a href="(.*?)"', html) == ["https://arxiv.org/abs/2512.08374"]
    assert not re.search(r"(?<!\\)<[^ ]", text)  # no HTML
    tables = re.findall(r"<table>(.*?)</table>", html, re.DOTALL)
    assert len(tables) == 4
    for table in tables:
        assert len({len(re.findall("<t[hd]", line)) for line in table.split("<tr>")[1:]}) == 1
    cells = re.findall(r"<td.*?>(.*?)</td>", tables[1])
    assert cells[:5] == ["0", "41.08", "1.07", "5.13", "4.97"] and cells[17:19] == ["1.03 holds", "-3.9 holds"]
    for words in ("contested", "transformers 5.24.0", "0123456789abcdef", "12 from photos", "photo-7.jpg and 4 more"):
        assert words in text
    assert '<code class="language-text">llava-norm-align diagnose llava-hf/llava-1.5-7b-hf --probe\n</code>' in html


def test_markdown_links_only_pictures_that_there_are():
    assert "png" not in markdown(diagnosis_result.full(), [])
    assert re.findall(r"\((\w+\.png)\)", markdown(diagnosis_result.full(), PLOTS[1:2])) == PLOTS[1:2]


HOSTILE = (
    "x|y](http://a.b) [z](javascript:c) ![i](d.png) <script>e</script> <http://f.g> `h` **i** _j_ ~~k~~ $l$ &lt; "
    "@me #1 www.m.n https://o.p \\| \\\n\n# q\n---\n- r\n```\n| s | t |\n"
)


def test_a_name_stays_in_its_cell():
    html = render(markdown_table([["head", "other"], [escape("a|b\\|c\\"), "1"]]))
    assert re.findall(r"<td.*?>(.*?)</td>", html) == ["a|b\\|c\\", "1"]


def test_markdown_takes_names_as_plain_text():
    result = diagnosis_result.full()
    result["model"] |= dict.fromkeys(("name", "class", "projector", "dtype", "quantization", "revision"), HOSTILE[:75])
    result["model"]["revision"] = result["prompt"] = result["images"]["source"] = result["command"] = HOSTILE
    result["images"]["names"], result["missing"] = [HOSTILE[75:135], HOSTILE[135:]], [HOSTILE]
    result["published"] |= {"model": HOSTILE, "note": HOSTILE}
    text = markdown(result, PLOTS)
    html, tame = render(text), render(markdown(diagnosis_result.full(), PLOTS))
    for tag in "h1 h2 h3 img a table tr td th em strong s script hr pre ul".split():
        assert html.count(f"<{tag}>") + html.count(f"<{tag} ") == tame.count(f"<{tag}>") + tame.count(f"<{tag} "), tag
    seen = " ".join(HOSTILE.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert (
        html.count(seen) == 7
    )  # revision, prompt, source, command, missing and, in one line, the paper's model and note
    prose = text[: text.index("````")]
    assert not re.search(r"(?<!\\)(@me|\$l|<[^ ])|www\.m|https://o", prose)
