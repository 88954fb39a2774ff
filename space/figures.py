"""diagnosis's plots as SVG that follows the page's light or dark colours."""

import io
import itertools
import re
from html import escape
from typing import Any

from PIL import Image
from transformers import ProcessorMixin

from llava_norm_align.diagnosis import plots
from llava_norm_align.diagnosis.plots import INK, LABEL, SMALL

# Colours of diagnosis.plots, and the page's variables (theme.py) that stand for them.
COLOURS = {
    plots.KINDS["visual"][0]: "--plot-visual",
    plots.KINDS["text"][0]: "--plot-text",
    INK: "--plot-ink",
    plots.GREY: "--plot-grey",
    "#dddddd": "--plot-grid",
    "#ffffff": "--plot-paper",
}
MAP_HEIGHT = 2.9  # inches
PIXELS = 120  # of an inch on a wide page
PALE = 0.6  # share of white in a picture under a map
_numbers = itertools.count()


def svg(figure: Any, title: str) -> str:
    """`figure` as HTML: an SVG whose ids are its own, with `title` for those who do not see it."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path"}):  # letters as shapes, whatever fonts the visitor has
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    prefix = f"plot{next(_numbers)}-"
    drawn = re.sub(r'\bid="', f'id="{prefix}', drawn)
    drawn = re.sub(r'(href="#|url\(#)', rf"\1{prefix}", drawn)
    for colour, variable in COLOURS.items():
        drawn = re.sub(re.escape(colour), f"var({variable})", drawn, flags=re.IGNORECASE)
    style = f"max-width: {round(figure.get_figwidth() * PIXELS)}px"
    return f'<figure class="plot" role="img" aria-label="{escape(title)}" style="{style}">{drawn}</figure>'


def seen_part(image: Image.Image, processor: ProcessorMixin) -> Image.Image | None:
    """The part of `image` that a square map of visual tokens covers; None where that is not known.

    A processor that scales the short side and crops the middle sees the middle square; one that scales to a square
    sees all.
    """
    options = processor.image_processor
    size = getattr(options, "size", None) or {}
    if hasattr(options, "image_grid_pinpoints"):
        return None
    if getattr(options, "do_center_crop", None) and "shortest_edge" in size:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return image.crop((left, top, left + side, top + side))
    return image if "height" in size else None


def draw_maps(results: list[dict[str, Any]], names: list[str], parts: list[Image.Image | None]) -> Any:
    """The attention to each patch, laid over what the model sees of the picture; None if no result has a map.

    All maps have one scale, so that they can be compared.
    """
    found = [
        (name, values, part)
        for result, name, part in zip(results, names, parts, strict=True)
        if (values := plots.attention_map(result)) and part is not None
    ]
    if not found:
        return None
    figure = plots.new_figure(MAP_HEIGHT)
    figure.set_figwidth(plots.WIDTH * (1 if len(found) > 1 else 0.65))
    highest = max(max(map(max, values)) for _, values, _ in found)
    colours = _see_through(plots.KINDS["text"][0])
    grid = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, values, part) in zip(grid, found, strict=True):
        picture = Image.blend(part.convert("RGB"), Image.new("RGB", part.size, "white"), PALE)
        picture.thumbnail((320, 320))
        width, height = picture.size
        axes.imshow(picture)
        drawn = axes.imshow(values, cmap=colours, vmin=0, vmax=highest, extent=(0, width, height, 0))
        axes.set_axis_off()
        title = axes.set_title(name, fontsize=SMALL, color=INK)
        title.set_parse_math(False)
    bar = figure.colorbar(drawn, ax=list(grid), fraction=0.04, pad=0.02)
    bar.ax.set_facecolor((0.9, 0.9, 0.9))  # as a pale picture, in the light and in the dark
    bar.ax.tick_params(labelsize=SMALL, colors=INK)
    bar.outline.set_edgecolor(plots.GREY)
    bar.set_label("attention (%)", fontsize=LABEL, color=INK)
    return figure


def _see_through(colour: str) -> Any:
    """A colour map from nothing to `colour`, through which a pale picture can be seen."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("see_through", [(*to_rgb(colour), 0), (*to_rgb(colour), 0.9)])


def draw_shares(results: list[dict[str, Any]]) -> Any:
    """The attention of the last prompt token to the image by layer; None if it was not measured."""
    shares = [plots.percents(plots.find_list(result, "attention", "image_share")) for result in results]
    if not all(shares):
        return None
    figure = plots.new_figure(3.9)
    even = plots.find_number(results[0], "attention", "image_tokens_share")
    plots.draw_shares(figure.add_subplot(), results, shares, even)
    return figure
