"""doctor: sound folders pass, and every fault fails one check and no other."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import locked
from llava_norm_align.conversion import answer_alone, doctor_alone
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.doctor import examine, repair
from tests.helpers import doctor as helper
from tests.helpers.convert import tiny_llava
from tests.helpers.doctor import DAMAGES, GAIN, LOADED, change_tensor, edit, read, sound
from tests.helpers.published import write_published

CASES = [(check, name) for check, damages in DAMAGES.items() for name in damages]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return sound(tmp_path_factory.mktemp("doctor") / "model")


@pytest.fixture
def folder(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def statuses(checks):
    return {check.number: check.status for check in checks}


def snapshot(folder):
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_sound_folder_passes_every_check_that_is_run(model):
    before = snapshot(model)
    checks = examine(model, load=False)
    assert statuses(checks) == {**dict.fromkeys(range(1, 8), "ok"), 8: "not run"}
    assert checks[-1].detail == "left out by --no-load"
    assert snapshot(model) == before


@pytest.mark.parametrize(("check", "name"), CASES, ids=[f"{check} {name}" for check, name in CASES])
def test_one_fault_fails_one_check(folder, check, name):
    named = DAMAGES[check][name](folder)
    checks = examine(folder, load=False)
    failed = [found for found in checks if found.status == "failed"]
    assert [found.number for found in failed] == [check], checks
    assert named in failed[0].detail
    assert "\n" not in failed[0].detail
    for found in checks[:7]:
        assert found.status == "ok" or found.number == check or found.detail == f"needs check {check}", found


def trained(folder):
    change_tensor(folder, GAIN, lambda gain: gain * torch.tensor([1.0, 3.0]).repeat(16))
    return folder


def scale(folder):
    target = 3.0
    fields = {"norm_align_type": "scale", "norm_align_scale": 0.25, "norm_align_target": target}
    edit(folder, "config.json", **fields)
    edit(folder, "norm_align/calibration.json", target_norm=target, projector_norm=12.0)
    return folder


def saved_again(folder):
    """As a script with transformers alone would do it: another layout, and no calibration.json."""
    new = folder.with_name("saved-again")
    AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(new)
    for path in folder.glob("*.json"):
        if not (new / path.name).exists() and path.name != helper.INDEX:
            shutil.copy(path, new)
    return new


SOUND = {
    "rms_norm without bias": (lambda path: sound(path, "rms_norm", bias=False), 3, "weight in fp32"),
    "none": (lambda path: sound(path, "none"), 3, "nothing to check"),
    "scale": (lambda path: scale(sound(path, "none")), 4, "0.25, as calibrated"),
    "trained": (lambda path: trained(sound(path)), 4, "2 times its start"),
    "saved again": (lambda path: saved_again(sound(path)), 4, "there is no norm_align/calibration.json"),
    "tied": (lambda path: sound(path, tied=True), 2, "ok"),
    "one file, new names": (lambda path: sound(path, shards=1, layout="new"), 1, "2 weight file(s)"),
    "bf16": (lambda path: sound(path, dtype=torch.bfloat16), 3, "fp32"),
    "siglip": (lambda path: sound(path, vision="siglip"), 6, "id 299"),
    "dinov2": (lambda path: sound(path, vision="dinov2"), 6, "id 299"),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_folders_of_every_kind_pass(tmp_path, name):
    make, number, detail = SOUND[name]
    checks = examine(make(tmp_path / "model"), load=False)
    assert statuses(checks) == {**dict.fromkeys(range(1, 8), "ok"), 8: "not run"}, checks
    assert detail in checks[number - 1].detail or detail == "ok"


@pytest.mark.parametrize(
    "name", ["pixtral-12b", "llava-v1.6-mistral-7b-hf", "llava-onevision-qwen2-0.5b-ov-hf", "vip-llava-7b-hf"]
)
def test_other_towers_and_families_pass(tmp_path, name):
    folder = tmp_path / "model"
    convert(str(write_published(name, tmp_path / "stock")), folder, report=False)
    checks = examine(folder, load=False)
    assert [check.status for check in checks[:7]] == ["ok"] * 7, checks
    if "image_grid_pinpoints" not in read(folder, "config.json"):
        return
    edit(folder, "preprocessor_config.json", image_grid_pinpoints=[[336, 672]])
    checks = examine(folder, load=False)
    assert [check.number for check in checks if check.status == "failed"] == [6], checks
    assert "image_grid_pinpoints" in checks[5].detail


def test_the_factor_of_norm_type_scale_is_compared(tmp_path):
    folder = scale(sound(tmp_path / "model", "none"))
    edit(folder, "config.json", norm_align_scale=0.26)
    checks = examine(folder, load=False)
    assert [check.number for check in checks if check.status == "failed"] == [4]
    assert "norm_align_scale" in checks[3].detail and "0.25" in checks[3].detail


def test_what_is_not_there_is_not_run(tmp_path):
    folder = sound(tmp_path / "model", processor=False)
    checks = examine(folder, load=False)
    assert statuses(checks)[6] == statuses(checks)[7] == "not run"
    assert "no image processor" in checks[5].detail and "no tokenizer" in checks[6].detail


def test_ids_are_not_compared_with_a_tokenizer_that_is_broken(folder):
    DAMAGES[7]["no vocabulary"](folder)
    checks = examine(folder, load=False)
    assert (checks[5].status, checks[5].detail) == ("not run", "needs check 7")


def impostor(path, script):
    """A program that passes for this Python while it is only asked with -c."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n{script}\n')
    path.chmod(0o755)
    return path


def test_a_sound_folder_answers_alone_and_another_python_fails_on_its_own(folder, tmp_path):
    answer = '{"tokenizer": "T", "transformers": "9"}'
    python = impostor(
        tmp_path / "python", f"[ \"$3\" = tokenizer ] && echo '{answer}' && exit\necho 'OSError: planted' >&2\nexit 3"
    )
    checks = examine(folder, pythons=[python])
    assert statuses(checks) == {**dict.fromkeys(range(1, 9), "ok"), 9: "failed"}, checks
    assert "T in transformers 9" in checks[6].detail
    assert "AutoModelForImageTextToText" in checks[7].detail and "about an image" in checks[7].detail
    assert checks[8].detail.endswith("OSError: planted") and str(python) in checks[8].detail


def test_a_fault_that_only_loading_shows(folder):
    LOADED["NaN in a weight"](folder)
    checks = examine(folder)
    assert statuses(checks) == {**dict.fromkeys(range(1, 8), "ok"), 8: "failed"}, checks
    detail = checks[7].detail
    assert "not finite" in detail and "Traceback" not in detail and "\n" not in detail


@pytest.mark.filterwarnings("ignore:.*AutoModelForVision2Seq.*:FutureWarning", "ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name", LOADED)
def test_logits_that_are_not_finite_are_no_answer(folder, name):
    answer_alone.answer(str(folder), "image")
    named = LOADED[name](folder)
    assert statuses(examine(folder, load=False))[7] == "ok"
    with pytest.raises(ValueError, match=named):
        answer_alone.answer(str(folder), "image")


def test_a_tokenizer_that_does_not_load_elsewhere_fails_check_7(folder, tmp_path):
    checks = examine(folder, pythons=[impostor(tmp_path / "python", "echo 'ValueError: planted' >&2; exit 1")])
    assert statuses(checks) == {**dict.fromkeys(range(1, 7), "ok"), 7: "failed", 8: "not run", 9: "not run"}
    assert "planted" in checks[6].detail and checks[8].detail == "needs check 7"


def test_a_folder_with_foreign_code_is_not_loaded(folder):
    """trust_remote_code would run it."""
    (folder / helper.CODE).write_text("raise SystemExit('this ran')")
    checks = examine(folder)
    assert checks[7].status == "not run" and checks[7].detail == "needs check 5"


@pytest.mark.filterwarnings("ignore:.*AutoModelForVision2Seq.*:FutureWarning")
def test_without_a_processor_it_answers_text_and_without_a_tokenizer_ids(folder, tmp_path):
    result = answer_alone.answer(str(folder), "text")
    assert isinstance(result["answer"], str) and "no image processor" in result["note"]
    bare = sound(tmp_path / "bare", processor=False)
    result = answer_alone.answer(str(bare), "ids")
    assert 1 <= len(json.loads(result["answer"])) <= 8 and "no tokenizer" in result["note"]


@pytest.mark.filterwarnings("ignore:.*AutoModelForVision2Seq.*:FutureWarning")
def test_a_processor_that_lacks_a_library_is_said(folder, monkeypatch):
    from transformers import AutoProcessor

    def lacking(*args, **kwargs):
        raise ImportError("\nSuchProcessor requires the Such library. Install it")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", lacking)
    result = answer_alone.answer(str(folder), "image")
    assert result["note"].endswith("SuchProcessor requires the Such library") and result["answer"]


def test_the_script_ends_with_its_parent(folder):
    lifeline, held = os.pipe()
    process = subprocess.Popen(
        [sys.executable, doctor_alone.SCRIPT, folder, "image", str(lifeline)],
        pass_fds=[lifeline],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(lifeline)
    time.sleep(0.3)
    assert process.poll() is None
    os.close(held)
    assert process.wait(timeout=20) == 1


def test_the_script_hides_the_package_and_its_neighbours(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import answer_alone; answer_alone.hide_the_package()\n"
        "from importlib.util import find_spec\n"
        "print([name for name in ('llava_norm_align', 'calibration') if find_spec(name)], end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(doctor_alone.SCRIPT.parent)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[]"), done.stderr


REPAIRABLE = [
    (5, "code edited"),
    (5, "code missing"),
    (5, "another auto_map"),
    (5, "no auto_map"),
    (6, "another patch size"),
    (6, "CLS not counted"),
    (6, "another strategy"),
    (7, "class of transformers 5"),
    (7, "list of transformers 5"),
    (7, "class of another type of model"),
]


def test_repair_mends_all_that_is_safe_and_no_more(folder):
    weights = {name: content for name, content in snapshot(folder).items() if name.suffix == ".safetensors"}
    for check, name in REPAIRABLE:
        DAMAGES[check][name](folder)
    changes = repair(folder)
    assert len(changes) >= 7 and all(isinstance(change, str) for change in changes)
    assert all(check.status == "ok" for check in examine(folder, load=False)[:7])
    after = snapshot(folder)
    assert {name: after[name] for name in weights} == weights
    assert repair(folder) == []
    assert snapshot(folder) == after
    assert not [path for path in folder.rglob("*") if path.name.endswith(".writing")]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no lock is left


def test_repair_gives_a_folder_of_an_older_version_the_tokens_of_its_source(tmp_path):
    """Which kept the source's LlamaTokenizer: transformers 5 follows that name only where the type is not llava."""
    source, folder = write_published("llava-1.5-7b-hf", tmp_path / "source"), tmp_path / "model"
    convert(str(source), folder, report=False)
    converted = (folder / "tokenizer_config.json").read_bytes()
    shutil.copy(source / "tokenizer_config.json", folder)
    [failed] = [check for check in examine(folder, load=False) if check.status == "failed"]
    assert failed.number == 7
    assert '"LlamaTokenizer" -> PreTrainedTokenizerFast, so that transformers 5 gives' in failed.detail
    [change] = repair(folder)
    assert change == failed.detail
    assert (folder / "tokenizer_config.json").read_bytes() == converted  # see test_convert_tokenizer.py


def test_repair_leaves_a_sound_folder_byte_for_byte(folder):
    before = snapshot(folder)
    assert repair(folder) == []
    assert snapshot(folder) == before


def test_repair_does_what_it_can_beside_a_broken_file(folder):
    (folder / "processor_config.json").write_text("{")
    helper.edit_code(folder)
    assert len(repair(folder)) == 1
    assert [check.number for check in examine(folder, load=False) if check.status == "failed"] == [1]
    (folder / "config.json").write_text("{")
    assert repair(folder) == []


def test_repair_refuses_a_folder_that_is_being_written(folder):
    helper.edit_code(folder)
    before = snapshot(folder)
    with locked(folder), pytest.raises(InputError, match="Another process is writing"):
        repair(folder)
    assert snapshot(folder) == before


def not_ours(folder):
    edit(folder, "config.json", model_type="bert")
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nowhere", "no folder"),
        (lambda folder: folder / "config.json", "no folder"),
        (lambda folder: folder / "norm_align", "no config.json"),
        (not_ours, "bert"),
        (lambda folder: tiny_llava(folder / "stock", processor=False), "not converted"),
    ],
)
@pytest.mark.parametrize("function", [examine, repair])
def test_what_is_no_norm_aligned_folder_is_refused(folder, function, make, says):
    with pytest.raises(InputError, match=says):
        function(make(folder))


def no_site(path):
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path / "nowhere", "no program"),
        (lambda path: path, "no program"),
        (lambda path: Path(__file__), "no program"),
        (lambda path: Path(shutil.which("cat")), "no Python interpreter"),
        (lambda path: no_site(path / "python"), "transformers and torch"),
    ],
)
def test_what_is_no_python_with_transformers_is_refused(model, tmp_path, make, says):
    with pytest.raises(InputError, match=says):
        examine(model, load=False, pythons=[make(tmp_path)])


def test_the_command_line(run, folder):
    code, out, _ = run("doctor", folder, "--no-load")
    assert code == 0 and out.splitlines()[0].startswith("[1] files whole: ok (")
    assert out.splitlines()[-1] == "No check failed"
    helper.edit_code(folder)
    code, out, _ = run("doctor", folder, "--no-load", "--json")
    content = json.loads(out)  # and nothing else
    assert code == 1 and content["ok"] is False and content["folder"] == str(folder) and content["repaired"] == []
    assert [check["number"] for check in content["checks"] if check["status"] == "failed"] == [5]
    assert set(content["checks"][0]) == {"number", "name", "status", "detail"}
    code, out, _ = run("doctor", folder, "--no-load", "--json", "--repair")
    assert code == 0 and json.loads(out)["ok"] is True and len(json.loads(out)["repaired"]) == 1


def test_bad_input_on_the_command_line(run, folder, tmp_path):
    for arguments in ([tmp_path / "nowhere"], [folder, "--no-load", "--python", tmp_path]):
        code, out, err = run("doctor", *arguments, "--json")
        assert code == 2 and out == "" and err.startswith("Error: ") and "Traceback" not in err


def test_details_name_the_file_of_the_norm(folder):
    DAMAGES[3]["gain in bf16"](folder)
    detail = examine(folder, load=False)[2].detail
    assert helper.norm_file(folder).name in detail and read(folder, helper.INDEX)["weight_map"][GAIN] in detail
