"""What one picture and question do in the models, by diagnosis: numbers, plots, words."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis import plots
from llava_norm_align.diagnosis.describe import first_rotations, layers_named
from llava_norm_align.diagnosis.diagnose import diagnose_model
from llava_norm_align.diagnosis.formats import decimals, find_list, find_number, mean_of, number, percent
from llava_norm_align.space import figures
from llava_norm_align.space.limits import Refused
from llava_norm_align.space.models import Shown

KEPT = ("norms", "ratio", "layers", "attention", "missing")  # of a diagnosis, for the API
FAILED = "These models cannot be measured on this picture and question; try another question."


def measure(models: Sequence[Shown], path: str, question: str) -> list[dict[str, Any]]:
    """The diagnosis of each model on the picture at `path`, without its controls' tables. Refused if it fails."""

    def diagnosis(shown: Shown) -> dict[str, Any]:
        return diagnose_model(shown.model, shown.processor, [Path(path)], name=shown.name, question=question)

    try:
        return [shown.worker.submit(diagnosis, shown).result() for shown in models]
    except InputError as error:
        raise Refused(FAILED) from error


def numbers(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a program gets of `measure`."""
    found = []
    for result in results:
        kept = {key: result[key] for key in KEPT}
        if kept["attention"] and kept["attention"]["map"]:
            kept["attention"] = kept["attention"] | {"map": kept["attention"]["map"] | {"image": "picture"}}
        found.append({"model": result["model"]["name"], "question": result["prompt"], **kept})
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """The numbers that matter most as HTML: a row for each, a column for each model."""
    named = layers_named(find_list(results[0], "layers"))
    rows: list[tuple[str, list[str]]] = [
        ("Length of a visual token at layer 0, mean L2 norm", _each(results, "norms", "visual", "mean")),
        ("Length of a text token of the question there", _each(results, "norms", "text", "mean")),
        ("Visual / text", _each(results, "ratio", "mean")),
    ]
    rotations = [first_rotations(find_list(result, "layers")) for result in results]
    for index, kind in enumerate(("visual", "text")):
        rows.append((f"Turn of a {kind} token, mean in {named}", [f"{decimals(r[index], 1)}°" for r in rotations]))
    attention = [mean_of(find_list(result, "attention", "image_share")) for result in results]
    rows.append(("Attention of the last prompt token to the picture", [percent(share) for share in attention]))
    head = "".join(f"<th>{escape(result['model']['name'])}</th>" for result in results)
    body = "".join(
        f"<tr><th>{escape(what)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for what, cells in rows
    )
    rows_of = f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="numbers">{rows_of}</table></div>'


def draw(models: Sequence[Shown], results: list[dict[str, Any]], image: Image.Image) -> dict[str, str]:
    """The plots as HTML, by name: norms, layers, rotation, shares, attention. What was not measured is left out."""
    names = [shown.name for shown in models]
    parts = [figures.seen_part(image, shown.processor) for shown in models]
    drawn = {
        "norms": (plots.draw_histograms(results), "Norms of visual and text tokens at layer 0"),
        "layers": (plots.draw_layers(results, "hidden_norm", "mean L2 norm of input", log=True), "Norm by layer"),
        "rotation": (plots.draw_layers(results, "rotation_degrees", "rotation (degrees)"), "Rotation by layer"),
        "shares": (figures.draw_shares(results), "Attention to the picture by layer"),
        "attention": (figures.draw_maps(results, names, parts), "Attention over the picture"),
    }
    return {name: figures.svg(figure, title) for name, (figure, title) in drawn.items() if figure is not None}


def _each(results: Sequence[dict[str, Any]], *keys: str) -> list[str]:
    return [number(find_number(result, *keys)) for result in results]
