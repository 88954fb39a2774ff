"""The tasks of the groups: they are in the registry, and lmms-eval's own prompts and scoring run on local rows."""

import datasets
import pytest
from lmms_eval.models import get_model
from lmms_eval.tasks import TaskManager

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.lmms import LLAVA_TASKS, PAPER_TASKS, evaluate_lmms, find_tasks, lmms_table
from llava_norm_align.evaluation.lmms_samples import RIGHT_ANSWERS
from tests.helpers import lmms, tiny

OPTIONS = ["cat", "dog", "red", "picture"]
# what each task reads of a row, besides its image
ROWS = {
    # the aligned model says "a", which is read as A; the other none of the letters
    "mmstar": lambda n: {
        "question": "what ?", "answer": "AAB"[n % 3], "index": n, "category": ["math", "coarse perception"][n % 2],
        "l2_category": str(n % 3),
    },
    "pope": lambda n: {"question": "is a cat ?", "answer": ["yes", "no"][n % 2], "question_id": str(n)},
    "seedbench_2": lambda n: {
        **{f"choice_{letter}": f"{n}.jpg" if n % 2 else "a cat" for letter in "abcd"},
        "question": "what ?", "answer": "ABCD"[n % 4], "question_id": str(n), "data_id": ["x"],
        "data_type": ["Single Image", "Image & Text Generation"][n % 2],
    },
    "ocrbench": lambda n: {
        "question": "what ?", "answer": ["a" if n % 2 else "fish"], "dataset": "x",
        "question_type": "Doc-oriented VQA",
    },
    "scienceqa_img": lambda n: {"question": "what ?", "choices": OPTIONS, "answer": n % 4, "hint": ""},
    "ai2d": lambda n: {"question": "what ?", "options": OPTIONS, "answer": str(n % 4)},
    "mme": lambda n: {
        "question": "is a cat ?", "answer": ["Yes", "No"][n % 2], "question_id": str(n // 2), "category": "count",
    },
    "textvqa_val": lambda n: {"question": "what ?", "answers": ["a dog"] * 10, "question_id": n},
    "vqav2_val": lambda n: {"question": "what ?", "answers": [{"answer": "a dog"}] * 10, "question_id": n},
}  # fmt: skip
# mme: both models have everything wrong here, so that the sum of points is the mean of scores, 0; see tests/fast
PAIRED = {
    "mmstar": RIGHT_ANSWERS, "pope": "pope_accuracy", "seedbench_2": "seed_all", "ocrbench": RIGHT_ANSWERS,
    "scienceqa_img": "exact_match", "ai2d": "exact_match", "mme": "mme_perception_score",
    "textvqa_val": "exact_match", "vqav2_val": "exact_match",
}  # fmt: skip


@pytest.fixture(scope="module")
def manager():
    return TaskManager()


@pytest.mark.parametrize("task", LLAVA_TASKS)
def test_lmms_eval_knows_every_task(manager, task):
    assert manager.match_tasks([task]) == [task] and task in manager.all_subtasks


def test_the_groups_are_those_that_are_promised():
    assert PAPER_TASKS == ("mmbench_en_dev", "mmstar", "pope", "seedbench_2", "ocrbench", "scienceqa_img", "ai2d")
    assert LLAVA_TASKS == (*PAPER_TASKS, "mme", "gqa", "textvqa_val", "vqav2_val")


def test_lmms_eval_finds_the_class():
    found = get_model("llava_norm_align")
    assert f"{found.__module__}.{found.__name__}" == "llava_norm_align.evaluation.lmms_model.LlavaNormAlign"


def test_unknown_names_are_refused_with_similar_ones(tmp_path):
    with pytest.raises(InputError, match=r"no task mmstr\. Did you mean .*\bmmstar\b.*\? Choose"):
        find_tasks(["pope", "mmstr"], [], tmp_path)
    with pytest.raises(InputError, match=r"no task zzzzzzzzzz\. Choose"):
        find_tasks(["zzzzzzzzzz"], [], tmp_path)


def test_a_tag_stands_for_its_tasks(tmp_path):
    found = find_tasks(["public_eval_qwen3_5_family"], [], tmp_path)
    assert {"mmbench_en_dev", "mmstar", "ocrbench", "ai2d"} <= set(found.values()) and found["mmstar"] == "mmstar"


def test_a_task_with_prompts_for_llava_alone_runs_with_them(tmp_path):
    assert find_tasks(["seedbench_2", "pope"], [], tmp_path) == {"seedbench_2_as_llava": "seedbench_2", "pope": "pope"}


def write_tasks(root, manager):
    """Copies of lmms-eval's tasks, called own_NAME, that read 16 local rows in place of the benchmark's."""
    folder = root / "harness"
    folder.mkdir()
    for name, row in ROWS.items():
        images = datasets.Image()
        rows = [{"image": tiny.photo(number // 2), **row(number)} for number in range(16)]
        if name == "seedbench_2":
            images = datasets.List(datasets.Image())
            rows = [one | {"image": [one["image"]] * (5 if number % 2 else 1)} for number, one in enumerate(rows)]
        table = datasets.Dataset.from_list(rows).cast_column("image", images)
        table.to_parquet(root / f"{name}.parquet")
        path, split = manager.task_index[name]["yaml_path"], manager._get_config(name)["test_split"]
        (folder / f"own_{name}.yaml").write_text(
            f"include: {path}\ntask: own_{name}\ndataset_path: parquet\ndataset_name: null\n"
            f"dataset_kwargs: {{data_files: {{{split}: {root / f'{name}.parquet'}}}}}\n"
        )
    return folder


def test_lmms_evals_own_tasks_run_and_are_paired(tmp_path, manager, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    lmms.build(tmp_path)
    names = [str(tmp_path / name) for name in lmms.models()]
    tasks = [f"own_{name}" for name in ROWS]
    result = evaluate_lmms(names, tasks=tasks, batch_size=8, include_path=write_tasks(tmp_path, manager))

    assert {row["task"] for row in result["rows"]} == {*tasks} and {row["n"] for row in result["rows"]} == {16}
    assert result["settings"]["llava_prompts"] == ["own_seedbench_2"]
    found = {}
    for one in result["differences"]:
        assert one["metric"] is not None and one["n"] <= 16, one
        if one["n"] == 16:
            found[one["task"].removeprefix("own_")] = one["metric"]
    assert found == PAIRED
    [mmstar] = [one for one in result["differences"] if one["task"] == "own_mmstar"]
    assert (mmstar["difference"], mmstar["only_first_right"], mmstar["only_second_right"]) == (11 / 16, 11, 0)
    assert {row["value"] for row in result["rows"] if row["metric"] == "average"} == {2 / 3, 0.0}
    table = lmms_table(result)
    assert all(task.replace("_", "\\_") in table for task in tasks) and "prompts that lmms-eval has for LLaVA" in table
