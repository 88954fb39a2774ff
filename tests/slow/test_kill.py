"""kill -9 at random moments of a conversion of 1 GB: the target is the state before it or the whole new one."""

import random
import shutil
from collections import Counter

import pytest

from tests.helpers import safety


@pytest.mark.parametrize(
    ("count", "pickled", "options"),
    [(25, False, []), (25, False, ["--link"]), (10, True, [])],
    ids=["copy", "link", "bin"],
)
def test_a_kill_at_any_moment(tmp_path, capsys, count, pickled, options):
    source, target, log = tmp_path / "source", tmp_path / "models" / "target", tmp_path / "log"
    safety.write_llava(source, hidden=1024, rows=131_072, pickled=pickled)
    assert sum(file.stat().st_size for file in source.iterdir()) > 1e9
    command = ["convert", source, target, "--no-report", "--overwrite", *options]
    safety.run_here(command)  # so that no child imports

    seconds = safety.duration(command, log)
    met = Counter()
    for number, moment in enumerate(safety.moments(count, seconds, random.Random(0))):
        if number % 2:
            shutil.rmtree(target)
        met[safety.break_off_and_go_on(source, target, moment, log, number, options)] += 1
    with capsys.disabled():
        print(f"\n{count} kills within {seconds:.1f} s, which met: {dict(met)}")
    assert met["writing"] >= count / 2 and met["ended"] <= count / 4
