"""The look of the page: system fonts, few colours, light and dark. Nothing is loaded from elsewhere."""

from typing import Any

CSS = """
.gradio-container {width: 100% !important; max-width: 1180px !important; margin: 0 auto !important;
  --plot-ink: #222222; --plot-grey: #777777; --plot-grid: #dddddd; --plot-paper: #ffffff;
  --plot-visual: #0072b2; --plot-text: #d55e00; --quiet: #52525b;}
.dark .gradio-container, .dark.gradio-container, .dark {
  --plot-ink: #e4e4e7; --plot-grey: #8b8b94; --plot-grid: #3f3f46; --plot-paper: #18181b;
  --plot-visual: #56b4e9; --plot-text: #f0883e; --quiet: #a1a1aa;}
#head h1 {font-size: 1.5rem; font-weight: 650; margin: .4rem 0 .3rem;}
#head p, .words p, .words li {max-width: 76ch; line-height: 1.5;}
#head p {margin: .3rem 0;}
.words table {display: block; overflow-x: auto;}
.words table, .words tr {border: 0 !important;}
.words th, .words td {word-break: normal; overflow-wrap: normal;}
#evaluation th, #evaluation td {white-space: nowrap; min-width: 5rem;}
@media (max-width: 640px) {
  #evaluation th, #evaluation td {white-space: normal; font-size: .82rem;}
  figure.plot {border: 0; padding: 0;}
}
#see-top {flex-wrap: wrap;}
#see-top .words {flex: 1 1 280px;}
.words li {margin: .2rem 0;}
.quiet {color: var(--quiet) !important; font-size: .9rem; line-height: 1.45;}
.dark button[role=tab][aria-selected=true] {color: #38bdf8 !important; border-color: #38bdf8 !important;}
#examples td {padding: .2rem .4rem !important;}
#examples td div:has(> img) {width: 48px !important; height: 48px !important; margin: 0 auto;}
#examples td img {width: 100% !important; height: 100% !important; object-fit: cover;}
.hint {padding: 1.5rem 0; font-size: 1.05rem;}
.seen {display: flex; align-items: center; gap: .7rem; margin: 0 0 .6rem;}
.seen img {width: 56px; height: 56px; object-fit: cover; border-radius: 4px;}
.note {border-left: 3px solid var(--plot-text); padding: .1rem 0 .1rem .7rem;}
.answer textarea {font-size: 1rem; line-height: 1.5;}
figure.plot {margin: 0; border: 1px solid var(--border-color-primary); border-radius: 8px; padding: .4rem;
  background: var(--plot-paper);}
figure.plot svg {width: 100%; height: auto; display: block;}
.plots {display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem;}
.plots h3 {font-size: 1rem; font-weight: 600; margin: .2rem 0;}
.plots p {margin: 0 0 .4rem;}
.scroll {overflow-x: auto;}
.scroll table, .scroll tr {border: 0 !important;}
.scroll table {border-collapse: collapse; width: 100%; font-size: .92rem;}
.scroll th, .scroll td, .words th, .words td {border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; text-align: left;
  padding: .4rem .7rem .4rem 0; font-weight: 400; vertical-align: top; overflow-wrap: break-word;}
.scroll thead th, .words thead th {font-weight: 600 !important;}
table.numbers td {font-variant-numeric: tabular-nums;}
table.history td {min-width: 4.5rem; max-width: 22rem; overflow-wrap: anywhere;}
table.history td:first-child {min-width: 52px;}
table.history img {width: 44px; height: 44px; min-width: 44px; object-fit: cover; border-radius: 4px;}
"""


def theme() -> Any:
    """Gradio's plain theme with the system's fonts."""
    import gradio as gr

    fonts = [gr.themes.Font(name) for name in ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")]
    mono = [gr.themes.Font(name) for name in ("ui-monospace", "Menlo", "Consolas", "monospace")]
    plain = gr.themes.Default(
        primary_hue=gr.themes.colors.sky, neutral_hue=gr.themes.colors.zinc, font=fonts, font_mono=mono
    )
    # a contrast of 4.5:1 and more
    return plain.set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        color_accent="*primary_700",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )
