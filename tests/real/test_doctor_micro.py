"""A converted micro-LLaVA passes every check of the doctor, in both transformers lines.

The wheels come from the folder in LLAVA_NORM_ALIGN_WHEELS, or from pip.
"""

import os
import sys
from pathlib import Path

import pytest
import transformers

from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.doctor import examine
from llava_norm_align.conversion.micro import DINOV2, SMOLLM2, cached_micro, find_wheel
from tests.helpers.lines import PYTHONS

OTHER = PYTHONS["5" if transformers.__version__.startswith("4.") else "4"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = os.environ.get("LLAVA_NORM_ALIGN_WHEELS")
    wheels = Path(folder) if folder else {find_wheel(wheel).parent for wheel in (SMOLLM2, DINOV2)}.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        target = tmp_path_factory.mktemp("converted") / "micro"
        convert(str(cached_micro(wheels)), target, report=False)
    return target


def test_every_check_passes_in_both_lines(converted):
    if not OTHER.is_file():
        pytest.skip(f"the other transformers line is not installed ({OTHER})")
    checks = examine(converted, pythons=[OTHER])
    assert [check.status for check in checks] == ["ok"] * 9, checks
    here, there = (check.detail for check in checks[7:])
    assert f"transformers {transformers.__version__}" in here
    assert ("AutoModelForVision2Seq" in here) != ("AutoModelForVision2Seq" in there)
    for detail in (here, there):
        assert "about an image" in detail

    def answer(detail):
        return detail.partition(" answered ")[2].partition(" when asked ")[0]

    assert answer(here) == answer(there) and len(answer(here)) > 4
    assert sys.executable in checks[7].name and str(OTHER) in checks[8].name
