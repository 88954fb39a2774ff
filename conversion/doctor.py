"""Numbered checks of a norm-aligned model folder, and the repairs that are safe."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.folders import locked
from llava_norm_align.common.loading import first_line
from llava_norm_align.common.results import write_json
from llava_norm_align.conversion import doctor_checks
from llava_norm_align.conversion.doctor_alone import check_alone, check_pythons, tokenizer_elsewhere
from llava_norm_align.conversion.doctor_checks import CONFIG_FILE, Failed, NotRun, Patient, code_faults, code_files
from llava_norm_align.conversion.doctor_processor import (
    check_processor,
    check_tokenizer,
    mend_tokenizer,
    processor_changes,
    tokenizer_changes,
)
from llava_norm_align.conversion.processor_fields import complete_processor_files
from llava_norm_align.conversion.processor_files import carry_chat_template
from llava_norm_align.conversion.verify import quiet_transformers

REPAIRABLE = ("code", "processor", "tokenizer")  # checks whose faults `repair` may mend
COPIED = ("processor", "tokenizer")  # checks of files that came from the source, or the adapter and its base


@dataclass(frozen=True)
class Check:
    """One check of a folder."""

    number: int
    name: str
    status: str  # "ok", "failed" or "not run"
    detail: str  # what was found, or why it was not run


def examine(
    folder: Path, *, load: bool = True, pythons: Sequence[Path] = (), tensors: int | None = None
) -> list[Check]:
    """All checks of the norm-aligned model in `folder`, in order.

    A check whose ground another one found broken is "not run", so that one fault fails one check. The last ones load
    the model in fresh processes, of this Python and of each of `pythons`, and let it answer; `load` False leaves them
    out, and reads only the rules for the tokenizer. InputError if `folder` is no norm-aligned model folder, or one of
    `pythons` no Python with transformers and torch. Files of the processor and tokenizer (checks 6 and 7) are those
    that a conversion found in its source. `tensors`: how many the model has, if the caller has just compared the keys.
    """
    return list(examine_stepwise(folder, load=load, pythons=pythons, tensors=tensors))


def examine_stepwise(
    folder: Path, *, load: bool = True, pythons: Sequence[Path] = (), tensors: int | None = None
) -> Iterator[Check]:
    """The checks of `examine`, each as soon as it is made."""
    patient, pythons = Patient(Path(folder)), check_pythons(pythons)
    elsewhere = (lambda: tokenizer_elsewhere(patient.folder, pythons)) if load else None
    checks: list[tuple[str, Callable[[], str]]] = [
        ("files whole", lambda: doctor_checks.check_files(patient)),
        ("keys complete", lambda: doctor_checks.check_keys(patient, tensors)),
        ("norm", lambda: doctor_checks.check_norm(patient)),
        ("calibration", lambda: doctor_checks.check_calibration(patient)),
        ("code", lambda: doctor_checks.check_code(patient)),
        ("processor", lambda: check_processor(patient)),
        ("tokenizer", lambda: check_tokenizer(patient, elsewhere)),
    ]
    for python in [Path(sys.executable), *pythons]:
        checks.append((f"answers alone in {python}", lambda python=python: check_alone(patient, python, load)))
    for number, (name, check) in enumerate(checks, 1):
        try:
            status, detail = "ok", check()
        except NotRun as reason:
            status, detail = "not run", str(reason)
        except (Failed, InputError) as fault:
            status, detail = "failed", str(fault)
        except Exception as error:  # whatever a damaged file leads to
            status, detail = "failed", f"{type(error).__name__}: {first_line(error)}"
        if status == "failed":
            patient.failed.add(number)
        yield Check(number, name, status, detail)


def check_new_model(folder: Path, what: str, libraries: str, tensors: int | None = None) -> list[Check]:
    """The checks of COPIED that fail in a model just `what`, such as "converted"; CheckFailed if another does."""
    failed = [check for check in examine(folder, load=False, tensors=tensors) if check.status == "failed"]
    for check in failed:
        if check.name not in COPIED:
            raise CheckFailed(
                f"The {what} model does not pass the doctor's check {check.number} ({check.name}): {check.detail} "
                f"Nothing was kept. Please report this with the versions of {libraries}."
            )
    return failed


def repair(folder: Path) -> list[str]:
    """Repair what is safe in a norm-aligned folder: processor fields, tokenizer class, code files and auto_map.

    Each file is written beside its old version and renamed; weights are never touched. Returns what was changed, in
    words. What cannot be repaired, such as a broken JSON file, is left for `examine` to name. InputError if `folder`
    is no norm-aligned model folder, or another process is writing it.
    """
    folder = Path(folder)
    Patient(folder)  # before a lock is made
    changes = []
    with locked(folder.resolve()):
        for step in (_repair_code, _repair_processor, _repair_tokenizer):
            with suppress(NotRun, InputError):
                changes += step(Patient(folder))
    return changes


def _repair_code(patient: Patient) -> list[str]:
    faults, changes = code_faults(patient), []
    for name, content in code_files(patient.model_class).items():
        if name in faults:
            kept = ""
            if (patient.folder / name).is_file():  # somebody may want what was edited
                shutil.copyfile(patient.folder / name, patient.folder / f"{name}.bak")
                kept = f"; the old one is {name}.bak"
            partial = patient.folder / f".{name}.writing"
            partial.write_bytes(content)
            os.replace(partial, patient.folder / name)
            changes.append(f"{name}: written, because it {faults[name]}{kept}")
    config, auto_map = patient.read(CONFIG_FILE), patient.model_class.config_class.AUTO_MAP
    if config.get("auto_map") != auto_map:
        write_json(patient.folder / CONFIG_FILE, {**config, "auto_map": auto_map})
        changes.append(f"{CONFIG_FILE}: auto_map names the package's classes")
    return changes


def _repair_processor(patient: Patient) -> list[str]:
    changes = carry_chat_template(patient.folder)
    if not processor_changes(patient):
        return changes  # the files stay as they are, byte for byte
    with quiet_transformers():
        return changes + complete_processor_files(patient.folder, patient.config)


def _repair_tokenizer(patient: Patient) -> list[str]:
    return mend_tokenizer(patient.folder, patient) if tokenizer_changes(patient) else []
