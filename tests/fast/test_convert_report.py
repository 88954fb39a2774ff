"""convert's report: source against target before any training."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.samples import PHOTOS, sample_photos
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion import report
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.describe import conclusion
from llava_norm_align.conversion.report import run_in_fresh_process, run_job
from llava_norm_align.diagnosis.measure import measure_layer0
from tests.helpers.convert import IMAGE, VOCAB, tiny_llava, write_photos


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


def test_the_report_runs_in_a_fresh_process_and_ends_with_the_agreement(tmp_path, photos, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)  # the package is found from anywhere
    source = tiny_llava(tmp_path / "source")
    summary = convert(str(source), tmp_path / "target", images=photos)
    found = summary["report"]
    assert found["text_logits_equal"] is True
    assert found["image_prompts"] == 2 * len(report.QUESTIONS) and found["images"] == ["0.png", "1.png"]
    last = conclusion(summary)
    assert (
        last
        == f"Train this model before use: top-1 agreement with the source is {100 * found['top1_agreement']:.1f} %"
    )
    json.dumps(summary, allow_nan=False)


def test_the_numbers_are_those_of_plain_transformers(tmp_path, photos):
    """Stock class, one prompt after another, softmax in numpy."""
    source = tiny_llava(tmp_path / "source")
    summary = convert(str(source), tmp_path / "target", report=False)
    job = {"task": "report", "source": str(source), "target": summary["target"], "images": list(map(str, photos))}
    found = run_job(job)

    processor = AutoProcessor.from_pretrained(summary["target"])
    stock = LlavaForConditionalGeneration.from_pretrained(source).eval()
    model = AutoModelForImageTextToText.from_pretrained(summary["target"]).eval()
    agreed, kl, visual = [], [], []
    for photo in photos:
        for question in report.QUESTIONS:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            batch = processor(text=text, images=Image.open(photo).convert("RGB"), return_tensors="pt")
            ids, pixels = batch["input_ids"], batch["pixel_values"]
            for step in range(report.ANSWER_TOKENS):  # greedy, by the source
                with torch.no_grad():
                    old = stock(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0, -1].double()
                    new = model(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0, -1].double()
                if step == 0:
                    p, q = (torch.exp(x - x.max()) / torch.exp(x - x.max()).sum() for x in (old, new))
                    kl.append((p * (p / q).log()).sum().item())
                agreed.append((old.argmax() == new.argmax()).item())
                answer = old.index_fill(0, torch.tensor([VOCAB - 1]), -math.inf).argmax()  # no image placeholder
                ids = torch.cat([ids, answer[None, None]], dim=1)
                if answer == stock.generation_config.eos_token_id:
                    break
        with torch.no_grad():
            features = stock.model.get_image_features(pixels)
            features = getattr(features, "pooler_output", features)  # transformers 5 and 4.57
            visual.append(features[0].norm(dim=-1))
    assert found["answer_positions"] == len(agreed)
    assert found["top1_agreement"] == pytest.approx(sum(agreed) / len(agreed), abs=1.01 / len(agreed))
    assert found["kl_nats"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found["kl_nats"] > 1e-4 and found["top1_agreement"] < 1  # the norm changed something
    assert found["layer0_norms"]["source"]["visual"] == pytest.approx(torch.cat(visual).mean().item(), rel=1e-5)
    assert found["layer0_norms"]["target"]["visual"] == pytest.approx(summary["norm"]["norm_align_target"], rel=1e-3)
    assert found["layer0_norms"]["source"]["text"] == found["layer0_norms"]["target"]["text"]


def test_a_model_agrees_with_itself(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    convert(str(source), tmp_path / "target", report=False, norm_type="none")
    job = {
        "task": "report",
        "source": str(source),
        "target": str(tmp_path / "target"),
        "images": list(map(str, photos)),
    }
    found = run_job(job)
    assert (found["top1_agreement"], found["kl_nats"], found["text_logits_equal"]) == (1.0, 0.0, True)


def test_a_model_that_would_answer_with_an_image_is_compared_too(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["language_model.lm_head.weight"][VOCAB - 1] = 10 * tensors["language_model.lm_head.weight"][VOCAB - 2]
    tensors["language_model.lm_head.weight"][VOCAB - 2] *= -10  # one of the two wins at every position
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(str(source), tmp_path / "target", report=False)
    job = {
        "task": "report",
        "source": str(source),
        "target": str(tmp_path / "target"),
        "images": list(map(str, photos)),
    }
    assert 0 <= run_job(job)["top1_agreement"] <= 1


def test_a_model_that_changed_without_an_image_is_not_kept(tmp_path, photos, monkeypatch):
    """A planted fault: one weight of the language model is changed after the copy was checked."""

    def change_one_weight(folder, *args):
        digests = check_weights(folder, *args)
        file = folder / "model-00001-of-00002.safetensors"
        tensors = load_file(file)
        tensors["language_model.model.layers.1.mlp.up_proj.weight"][0, 0] += 0.01
        save_file(tensors, file, metadata={"format": "pt"})
        return digests

    check_weights = conversion.check_weights
    monkeypatch.setattr(conversion, "check_weights", change_one_weight)
    monkeypatch.setattr(conversion, "run_in_fresh_process", run_job)
    source = tiny_llava(tmp_path / "source")
    with pytest.raises(CheckFailed, match="different logits for text without an image"):
        convert(str(source), tmp_path / "target", images=photos)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "source"]


def test_a_process_that_dies_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "llava_norm_align").mkdir()  # a package in which the module does not exist
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "llava_norm_align" / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(
        CheckFailed, match=r"report process ended with code -9: .*\. A negative.*lack of memory\. Pass"
    ):
        run_in_fresh_process({"task": "report", "images": ["x" * 1000] * 1000})  # more than a pipe holds


def test_a_job_may_be_longer_than_an_argument_list(tmp_path):
    source = tiny_llava(tmp_path / "source")
    convert(str(source), tmp_path / "target", report=False)
    images = [str(tmp_path / f"{number}-{'x' * 200}.png") for number in range(20_000)]  # 4 MB
    job = {"task": "projector_norm", "source": str(source), "target": str(tmp_path / "target"), "images": images}
    with pytest.raises(InputError, match="There is no image file at .*/0-x") as failure:
        run_in_fresh_process(job)
    assert "signal" not in str(failure.value) and "--no-report" not in str(failure.value)


def test_the_process_ends_with_its_parent(tmp_path):
    """The child waits for a writer of the FIFO that stands for the source's config.json."""
    target = tiny_llava(tmp_path / "target")
    (tmp_path / "source").mkdir()
    fifo = tmp_path / "source" / "config.json"
    os.mkfifo(fifo)
    job = {"task": "report", "source": str(fifo.parent), "target": str(target), "images": []}
    code = f"from llava_norm_align.conversion.report import run_in_fresh_process as run; run({job!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600  # two processes import in turn, which takes long on a busy machine
    while (writer := open_writer(fifo)) is None:  # until the child reads
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    with pytest.raises(BrokenPipeError):  # nobody reads any longer
        while time.monotonic() < deadline:
            os.write(writer, b" ")
            time.sleep(0.05)
    os.close(writer)


def open_writer(fifo):
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no reader yet
        return None


def test_sample_photos_lie_in_the_wheel():
    pytest.importorskip("skimage")
    assert all(path.is_file() for path in sample_photos("A test", PHOTOS))


def test_layer0_norms_leave_padding_out(tmp_path):
    source = tiny_llava(tmp_path / "source")
    model = LlavaForConditionalGeneration.from_pretrained(source).eval()
    ids = torch.tensor([[0, 0, 5, *[VOCAB - 1] * 4], [6, 7, 8, *[VOCAB - 1] * 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    pixels = torch.randn(2, 3, IMAGE, IMAGE)
    rows = [dict(input_ids=ids[[i]], attention_mask=mask[[i]], pixel_values=pixels[[i]]) for i in range(2)]
    norms = {kind: found.summary() for kind, found in measure_layer0(model, rows).norms.items()}
    text = model.get_input_embeddings().weight[[5, 6, 7, 8]].double().norm(dim=1)
    with torch.no_grad():
        features = model.model.get_image_features(pixels)
    visual = torch.cat(list(getattr(features, "pooler_output", features))).double().norm(dim=-1).flatten()
    for kind, expected in (("text", text), ("visual", visual)):
        assert norms[kind]["n"] == len(expected)
        assert norms[kind]["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
        assert norms[kind]["max"] == pytest.approx(expected.max().item(), rel=1e-5)
    assert norms["padding"]["n"] == 2
