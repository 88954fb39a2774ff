"""Calls that cannot be: exit code 2, one line that says what, where and what to do, and nothing written."""

import shutil

import pytest
from huggingface_hub.errors import RevisionNotFoundError
from PIL import Image

from llava_norm_align.common import loading
from llava_norm_align.conversion.convert import convert
from tests.helpers.convert import tiny_llava, write_json
from tests.helpers.faults import cut
from tests.helpers.refusals import build, check_refused, lay_traps

# of a sound folder: arguments -> what the message says
ARGUMENTS = {
    "--vision {parts}/tower": "is a whole model in the transformers layout, so --vision and --text have no use",
    "--text x/y": "is a whole model in the transformers layout",
    "--norm layernorm": "--norm is 'layernorm'. Pass one of layer_norm",
    "--start middle": "--start is 'middle'. Pass text .* or visual",
    "--start visual --target 2": "--start visual measures .*--target 2",
    "--start visual --norm scale": "--start visual is for a norm with a gain.*--norm is scale",
    "--start visual --norm none": "--start visual is for a norm with a gain.*--norm is none",
    "--fold": "--fold is for --norm scale.*--norm is layer_norm",
    "--target 0": "--target is 0.0; an L2 norm was expected",
    "--target=-1": "--target is -1.0",
    "--target nan": "--target is nan",
    "--target inf": "--target is inf",
    "--target 1e-40": "makes a gain of .*float32 holds .*--target",
    "--target 1e300": "makes a gain of .*--target",
    "--images {root}/none.png": "There is no image file at .*none.png",
    "--images {root}/text.png": "text.png is not an image",
    "--images {root}/huge.png": "huge.png is 12000 x 9000",
    "--images {root}/cut.png": "cut.png is a broken image",
    "--images {root}/empty": "The folder .*empty of --images is empty",
    "--report --dry-run --images {root}/none.png": "There is no image file at .*none.png",
    "--revision main": "source is a folder, which has no revision main. Leave out --revision",
}

# another SRC or DST, and verbs -> what the message says
CALLS = {
    "convert {root}/empty {root}/target": "The folder .*empty is empty",
    "convert {root}/text.png {root}/target": "text.png is a file",
    "convert {root}/nothing {root}/target": "There is no folder .*nothing",
    "convert a/b/c {root}/target": "There is no folder a/b/c",
    "convert someone/some-llava {root}/target": "no folder someone/some-llava, and the Hub cannot be asked",
    "convert some--llava..x {root}/target": "neither a folder nor a Hub id",
    "convert {source} {source} --overwrite": "overlap",
    "convert {source} {source}/inside --dry-run": "overlap",
    "convert {source} {source}/inside": "overlap",
    "convert {source} {root} --overwrite": "holds the working folder",
    "convert {source} {root}/link/inside": "overlap",
    "convert {source} {root}/link": "link is a link",
    "convert {source} {root}/filled": "filled is not empty.*--overwrite",
    "convert {source} {root}/filled --overwrite": "filled holds no model .*so --overwrite does not replace it",
    "convert {source} {root}/text.png": "text.png exists and is not a folder",
    "convert {source} {root}/text.png/target": "text.png is not a folder that you may write to",
    "convert {source} {root}/{long}": "has more than 240 bytes",
    "convert {source} .": "holds the working folder",
    "convert {source} /": "holds your home|overlap",
    "doctor {source}": "is a stock model .*llava-norm-align convert",
    "doctor {root}/text.png": "text.png",
    "doctor {root}/nothing": "There is no folder .*nothing",
    "doctor {root}/empty": "The folder .*empty is empty",
    "doctor {root}/filled": "There is no config.json in .*filled",
    "doctor {root}/link --python {root}/nothing": "link is a stock model",
    "doctor {source} --repair": "is a stock model",
    "assemble {root}/target --vision {parts}/tower": "assemble needs two parts. Pass --vision and --text",
    "assemble {root}/target --vision {parts}/tower --text {root}/nothing": "There is no folder .*nothing",
    "ask {root}/empty {root}/text.png what": "text.png is not an image",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def refused(built, tmp_path, monkeypatch, run):
    lay_traps(tmp_path, monkeypatch)
    return lambda line, message: check_refused(line, message, tmp_path, built / "parts", run)


@pytest.mark.parametrize("options", ARGUMENTS)
def test_options_that_are_wrong_or_do_not_go_together(built, tmp_path, refused, options):
    shutil.copytree(built / "safetensors", tmp_path / "source")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "huge.png")
    Image.effect_noise((60, 60), 9).save(tmp_path / "cut.png")
    cut(tmp_path / "cut.png")
    refused("convert {source} {root}/target " + options, ARGUMENTS[options])


@pytest.mark.parametrize("line", CALLS)
def test_sources_and_targets_that_are_none(built, tmp_path, refused, line):
    shutil.copytree(built / "safetensors", tmp_path / "source")
    refused(line, CALLS[line])


def test_a_revision_that_does_not_exist(refused, monkeypatch):
    def refuse(*args, **kwargs):
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(loading, "snapshot_download", refuse)
    refused("convert someone/some-llava {root}/target --revision v9", "someone/some-llava has no revision v9")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("convert a", "Missing argument 'DST'"),
        ("convert a b --target tall", "Invalid value for '--target'"),
        ("convert a b --nrom scale", "No such option: --nrom"),
        ("doctor a b", "unexpected extra argument"),
        ("konvert a b", "No such command 'konvert'"),
    ],
)
def test_a_command_line_that_cannot_be_read(run, line, says):
    """One error after the usage, which is the remedy."""
    code, _, err = run(*line.split())
    assert code == 2 and "Traceback" not in err
    assert says in err and err.startswith("Usage: ") and "--help" in err and err.count("Error: ") == 1


def test_a_report_needs_a_processor_and_photos(tmp_path, refused, monkeypatch):
    command = "convert {source} {root}/target --report"
    source = tiny_llava(tmp_path / "source", processor=False)
    refused(command, "needs a processor")
    summary = convert(str(source), tmp_path / "target")  # not asked for: left out, and said so
    assert summary["report"] is None and "no report: the source has no processor" in summary["notes"]

    shutil.rmtree(source), shutil.rmtree(tmp_path / "target")
    tiny_llava(source)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(command, r"scikit-image.*pip install 'llava-norm-align\[samples\]'")
    summary = convert(str(source), tmp_path / "target")
    assert summary["report"] is None and any("scikit-image" in note for note in summary["notes"])


@pytest.mark.parametrize("damage", ["no tokenizer", "unknown class"])
def test_a_processor_that_does_not_load(tmp_path, refused, damage):
    """An error where a report was asked for, else a note."""
    source = tiny_llava(tmp_path / "source")
    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    if damage == "no tokenizer":
        for file in source.glob("tokenizer*"):
            file.unlink()
    else:
        nobodys = {"image_processor_type": "NobodysImageProcessor", "size": {"shortest_edge": 28}}
        write_json(source / "preprocessor_config.json", nobodys)
    message = f"{source} has no processor that can be loaded"
    for option in ("--report", "--norm scale", "--start visual"):
        refused("convert {source} {root}/target --images {root}/photo.png " + option, message)
    summary = convert(str(source), tmp_path / "target", images=[tmp_path / "photo.png"])
    assert summary["report"] is None
    assert any(note.startswith(f"no report: {message}") for note in summary["notes"])
    assert not any(".writing" in note for note in summary["notes"])
