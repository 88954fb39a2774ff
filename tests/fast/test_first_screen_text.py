"""The words of the first screen: norms, clipping, marked tokens, sizes."""

import pytest

pytest.importorskip("trl")

from transformers import PreTrainedTokenizerFast

from llava_norm_align.trl_recipes import first_screen_facts as facts
from llava_norm_align.trl_recipes import first_screen_text as text
from tests.helpers import published_tokenizers, tiny
from tests.helpers.training import norm_aligned, trainer


def test_a_disk_that_is_too_small_is_told():
    disk = dict(checkpoints=3, checkpoint=2**30, with_optimizer=True, finished=2**29, needed=7 * 2**29)
    told = " ".join(text.describe_disk({**disk, "available": 2**30}).split())
    assert told.startswith("disk NOT ENOUGH: 3.5 GiB for the finished model (512.0 MiB) and 3 checkpoints of 1.0 GiB")
    assert "Set save_total_limit" in told
    assert "NOT ENOUGH" not in text.describe_disk({**disk, "available": 2**32})


def facts_of_clipping(clipping, gwc=True, optimizer="AdamW", frozen=False):
    return {
        "clipping": clipping,
        "norm": {"type": "layer_norm", "gwc": gwc},
        "optimizer": {"name": optimizer},
        "groups": [{"part": "projector", "frozen": frozen}, {"part": "norm"}, {"part": "vision", "frozen": True}],
    }


OFF, GLOBAL, PART = {"kind": "off"}, {"kind": "global", "limit": 1.0}, {"kind": "part", "limit": 0.5}


@pytest.mark.parametrize(
    ("given", "start", "noted"),
    [
        (dict(clipping=OFF), "off", "within noise"),
        (dict(clipping=PART), "the gradients of each part to a norm of 0.5", "takes nothing from the other parts"),
        (dict(clipping=GLOBAL), "all gradients together to a norm of 1", "most of the global norm"),
        (dict(clipping=OFF, gwc=False), "off", None),
        (dict(clipping=GLOBAL, gwc=False), "all gradients together to a norm of 1", None),
        (dict(clipping=OFF, optimizer="SGD"), "off", None),
        (dict(clipping=OFF, frozen=True), "off", None),  # GWC reaches nothing that is trained
        (dict(clipping=OFF, optimizer="AdamW8bit"), "off", "AdamW8bit divides"),
    ],
)
def test_what_clipping_means_for_gwc(given, start, noted):
    told = text.describe_clipping(facts_of_clipping(**given))
    assert told.startswith(start)
    assert noted in told if noted else told == start


@pytest.mark.parametrize(("fields", "kind"), [({}, OFF), ({"max_grad_norm": 1.0}, GLOBAL)])
def test_clipping_is_read_back(tmp_path, fields, kind):
    assert facts.clipping(trainer(norm_aligned(), tmp_path, **fields)) == kind
    part = trainer(norm_aligned(), tmp_path, max_grad_norm=0.5, clip_by_group=True)
    assert facts.clipping(part) == PART


def test_norms_of_each_type():
    def told(model):
        return text.describe_norm(facts.norm_facts(model))

    assert told(tiny.stock_llava()) == "none: a stock projector"
    assert told(norm_aligned(norm_align_type="none", norm_align_gradient_compensation=False)).startswith("none (a con")
    scale = dict(norm_align_type="scale", norm_align_scale=0.25, norm_align_gradient_compensation=False)
    assert told(norm_aligned(**scale)) == "a fixed factor of 0.25"
    rms = norm_aligned(norm_align_type="rms_norm", norm_align_bias=False, norm_align_gradient_compensation=False)
    rms.model.multi_modal_projector.align_norm.weight.data.fill_(-0.125)
    assert told(rms) == "rms norm, mean |g| 0.125, GWC off"


def test_spaces_stay_where_a_tokenizer_drops_the_first_one():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=published_tokenizers.llama2(), bos_token="<s>")
    ids = tokenizer("USER: do you\nsee ASSISTANT: one two").input_ids
    start = len(tokenizer("USER: do you\nsee ASSISTANT:").input_ids)
    kept = [number >= start for number in range(len(ids))]
    # a line break is written out; the space before an answer's first token is the token's
    assert text.mark_supervised(tokenizer, ids, kept, -1) == r"<s> USER: do you\nsee ASSISTANT:[[ one two]]"


def test_a_long_row_is_cut_in_its_middle():
    batch = {"text": "a" * 500 + "b" * 2000 + "c" * 500, "supervised": [3], "tokens": [9], "image_labels": [0]}
    told = text.describe_batch(batch)
    assert max(map(len, told.split("\n"))) <= 100 and len(told) < 1400
    assert told.replace("\n", "").replace(" ", "").startswith("firstrow" + "a" * 450 + "..." + "c" * 450 + "labels")


def test_several_devices_and_processes_are_told():
    peaks = [{"device": "cuda", "number": n, "peak": (10 + n) * 2**30, "total": 80 * 2**30} for n in range(2)]
    assert text.describe_memory(peaks) == "at most 10.0 GiB to 11.0 GiB of 80.0 GiB on each of 2 GPUs"
    assert text.describe_memory(peaks[:1]) == "at most 10.0 GiB of 80.0 GiB"
    assert text.describe_devices({"processes": 8, "distributed": "FSDP2", "device": "cuda:0 (H200)"}) == (
        "8 processes (FSDP2), the first on cuda:0 (H200)"
    )
