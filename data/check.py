"""check-data: every row of a data file in LLaVA's JSON looked at before a training does. See docs/check-data.md."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm
from transformers import ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import load_processor, resolve_model
from llava_norm_align.data.check_cache import find_verdict, keep_verdict, verdict_key
from llava_norm_align.data.check_images import ImageFile, ImageFolder, listing_sha256
from llava_norm_align.data.check_lengths import TokenCounter
from llava_norm_align.data.check_report import build_report, one_sentence
from llava_norm_align.data.llava_json import Fault, Row, entries, fits_stage_1, parse_row, read_text

BATCH = 1000  # rows that are tokenised in one call
PART = 50  # images that a thread takes at a time
PROCESSOR_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def check_data(
    path: Path | str,
    image_folder: Path | str,
    processor: ProcessorMixin | Path | str | None = None,
    *,
    max_length: int | None = None,
    template: Path | str | None = None,
    decode: bool = False,
    jobs: int = 2,
    stage: int = 2,
    follow_links: bool = False,
    clean: Path | str | None = None,
) -> dict[str, Any]:
    """Look at every row of `path` and its image; return the report, which is also kept for `cached_verdict`.

    `processor`: or its model's folder or Hub id; with it the tokens of each row are counted, the image expanded, and
    rows of more than `max_length` are bad. `template`: the chat template's name or file, as training takes it; None:
    the processor's own. `decode`: read all pixels, not the header alone. `jobs`: threads that read images. `stage`: 1
    (one image and one answer a row, no question) or 2. `follow_links`: allow links that lead out of the image folder.
    `clean`: a new file for the rows that are good. InputError if nothing can be read, or no row is good.
    """
    path = Path(path)
    images, counter = ImageFolder(image_folder, decode, follow_links), _counter(processor, max_length, stage, template)
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, but at least 1 was expected.")
    if clean is not None:
        _check_clean(Path(clean), path)
    text, sha256 = read_text(path)
    check = _Check(images, counter, max_length, stage)
    spans = []
    with (
        warnings.catch_warnings(),  # of all threads
        ThreadPoolExecutor(jobs + 1) as pool,  # one more counts tokens
        tqdm(total=len(text), desc="check rows", unit="B", unit_scale=True, disable=None) as bar,
    ):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limits are lower
        for batch in _batches(entries(text, path)):
            check.add([entry for _, _, entry in batch], pool)
            spans += [(start, end) for start, end, _ in batch]
            bar.update(spans[-1][1] - bar.n)
        faults = check.finish()
    listing = listing_sha256((name, file.stamp) for name, file in check.files.items())
    report = build_report(
        faults,
        check.totals,
        check.lengths if counter else None,
        data={"path": str(path), "sha256": sha256},
        images={"path": str(image_folder), "files": len(check.files), "listing_sha256": listing},
        options={
            "decode": decode,
            "follow_links": follow_links,
            "stage": stage,
            "max_length": max_length,
            "image_tokens": counter and counter.image_tokens,
        },
    )
    if report["totals"]["good"] == 0:
        raise InputError(one_sentence(report))
    if clean is not None:
        bad = {fault.index for fault in faults}
        _write_clean(Path(clean), text, [span for index, span in enumerate(spans) if index not in bad])
        report["clean"] = str(clean)
    keep_verdict(verdict_key(sha256, listing, images, decode, stage, counter, max_length), report)
    return report


def cached_verdict(
    path: Path | str,
    image_folder: Path | str,
    processor: ProcessorMixin | Path | str | None = None,
    *,
    max_length: int | None = None,
    template: Path | str | None = None,
    decode: bool = False,
    stage: int = 2,
    follow_links: bool = False,
) -> dict[str, Any] | None:
    """The report of an earlier `check_data` with these arguments, if neither the data file nor an image changed since.

    The file is hashed, and of each image its bytes and its time of change are looked up. One with `decode` serves a
    call without it. None if there is no such report.
    """
    images, counter = ImageFolder(image_folder, decode, follow_links), _counter(processor, max_length, stage, template)
    text, sha256 = read_text(path)
    names = set()
    for index, (_, _, entry) in enumerate(entries(text, path)):
        row, faults = parse_row(entry, index, images.folder)
        if _has_file(row, faults):
            names.add(entry["image"])
    listing = listing_sha256((name, images.stamp(name)) for name in names)
    keys = (verdict_key(sha256, listing, images, decoded, stage, counter, max_length) for decoded in {True, decode})
    return next((verdict for key in keys if (verdict := find_verdict(key))), None)


def bad_indices(report: dict[str, Any]) -> set[int]:
    """Positions (from 0) of the rows in which a report found a fault."""
    return {row["index"] for row in report["rows"]}


class _Check:
    """The faults, image files and lengths of the rows that were added so far."""

    def __init__(self, images: ImageFolder, counter: TokenCounter | None, max_length: int | None, stage: int):
        self.images, self.counter, self.max_length, self.stage = images, counter, max_length, stage
        self.faults: list[Fault] = []
        self.files: dict[str, ImageFile] = {}
        self.lengths: list[int] = []
        self.good: list[tuple[int, str, str | None, int]] = []  # index, id, name of the image file, hash of the text
        self.pending: tuple[list[tuple[int, Row]], Future | None] = [], None  # rows whose tokens are being counted
        self.totals = {"rows": 0, "with_image": 0, "text_only": 0, "multi_turn": 0}

    def add(self, batch: list[Any], pool: Executor) -> None:
        first = self.totals["rows"]
        parsed = [parse_row(entry, first + number, self.images.folder) for number, entry in enumerate(batch)]
        files = [
            entry["image"] if _has_file(row, faults) else None
            for entry, (row, faults) in zip(batch, parsed, strict=True)
        ]
        new = [name for name in dict.fromkeys(files) if name is not None and name not in self.files]
        parts = [new[start : start + PART] for start in range(0, len(new), PART)]
        for found in pool.map(lambda names: [(name, self.images.inspect(name)) for name in names], parts):
            self.files.update(found)
        left = []
        for number, (name, (row, faults)) in enumerate(zip(files, parsed, strict=True)):
            index = first + number
            self._count(row)
            if row and name and (fault := self.files[name].fault):
                faults.append(Fault(index, row.id, *fault))
            if row and not faults and self.stage == 1 and not fits_stage_1(row):
                faults.append(Fault(index, row.id, "stage_1", "It is not one image and one answer."))
            self.faults += faults
            if not faults:
                left.append((index, row, self.files[name].size if name else None))
        self._settle()
        counted = [row for _, row, _ in left], [size for _, _, size in left]
        lengths = pool.submit(self.counter.count, *counted) if self.counter and left else None
        self.pending = [(index, row) for index, row, _ in left], lengths

    def _settle(self) -> None:
        """Take the lengths of the batch before, which were counted while this one was read."""
        left, lengths = self.pending
        if lengths is not None:
            left = self._with_good_length(left, lengths.result())
        self.good += [(index, row.id, row.image and row.image.name, hash(row.turns)) for index, row in left]

    def _count(self, row: Row | None) -> None:
        self.totals["rows"] += 1
        if row is not None:
            self.totals["text_only" if row.image is None else "with_image"] += 1
            self.totals["multi_turn"] += len(row.turns) > 2

    def _with_good_length(self, left: list[tuple[int, Row]], lengths: list[int | None]) -> list[tuple[int, Row]]:
        good = []
        for (index, row), length in zip(left, lengths, strict=True):
            if length is None:
                sentence = f"Its text holds {self.counter.image_token}, which stands for an image in this model."
                self.faults.append(Fault(index, row.id, "image_count", sentence))
                continue
            self.lengths.append(length)
            if self.max_length is not None and length > self.max_length:
                sentence = f"It has {length:,} tokens with its image expanded; at most {self.max_length:,} fit."
                self.faults.append(Fault(index, row.id, "too_long", sentence))
            else:
                good.append((index, row))
        return good

    def finish(self) -> list[Fault]:
        """All faults by row, those of repeated ids too.

        LLaVA's own file has several conversations about one image under one id, so an id may come again with the same
        image and another text. A second image under one id, or the same text again, is a fault of the later row.
        Images are compared by file name: GQA and Visual Genome have the same pictures in folders of their own.
        """
        self._settle()
        image_of: dict[str, tuple[int, str | None]] = {}
        seen: dict[tuple[str, int], int] = {}
        for index, id, image, text in self.good:
            first, first_image = image_of.setdefault(id, (index, image))
            copied = seen.setdefault((id, text), index)
            if image != first_image or (image is None and first != index):
                what = f"Its id is that of row {first}, which has another image or is a text of its own."
            elif copied != index:
                what = f"It is a copy of row {copied}: the same id, image and text."
            else:
                continue
            self.faults.append(Fault(index, id, "duplicate_id", what))
        return sorted(self.faults, key=lambda fault: fault.index)


def _has_file(row: Row | None, faults: list[Fault]) -> bool:
    """Whether the image of a row is to be looked at; one outside of the folder is not."""
    return row is not None and row.image is not None and all(fault.kind != "outside_folder" for fault in faults)


def _counter(
    processor: ProcessorMixin | Path | str | None, max_length: int | None, stage: int, template: Path | str | None
) -> TokenCounter | None:
    if stage not in (1, 2):
        raise InputError(f"The stage is {stage}, but 1 or 2 was expected.")
    if max_length is not None and max_length < 1:
        raise InputError(f"max_length is {max_length}, but at least 1 token was expected.")
    if processor is None:
        if max_length is not None:
            raise InputError("max_length counts tokens, which needs a model. Pass --model with its folder or Hub id.")
        return None
    if not isinstance(processor, ProcessorMixin):
        processor = load_processor(resolve_model(str(processor), patterns=PROCESSOR_FILES))
    return TokenCounter(processor, stage, template)


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(items, BATCH)):
        yield batch


def _check_clean(clean: Path, path: Path) -> None:
    if clean.exists() or clean.is_symlink():
        same = path.exists() and clean.exists() and clean.samefile(path)
        what = "is the data file itself" if same else "exists"
        raise InputError(f"The clean file {clean} {what}. Name a new file.")
    if not clean.absolute().parent.is_dir() or not os.access(clean.absolute().parent, os.W_OK):
        raise InputError(f"The clean file {clean} cannot be written: its folder is not there, or not yours to write.")


def _write_clean(clean: Path, text: str, spans: list[tuple[int, int]]) -> None:
    """The good rows as they are in the input, byte for byte, one a line; written beside `clean`, then renamed."""
    partial = clean.with_name(f".{clean.name}.writing")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            for number, (start, end) in enumerate(spans):
                file.write(("[\n" if number == 0 else ",\n") + text[start:end])
            file.write("\n]\n")
        os.replace(partial, clean)
    finally:
        partial.unlink(missing_ok=True)
