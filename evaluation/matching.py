"""When an answer counts as right: exact match, normalised match, multiple choice."""

import re
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# "B", "(B)", "B.", "B) a dog", "B: a dog", "Answer: B", "The answer is (B)."; not "A dog", whose A is an article
_LETTER = re.compile(
    r"(?:(?:the )?(?:(?:correct|right) )?(?:answer|option)(?: is)?:? *)?"
    r"(?:\(([A-Z])\)(?![\w'])|([A-Z])(?=[.:)](?:\s|$)|[.:)]*(?:\n|$)))",
    re.IGNORECASE,
)


def normalise(text: str) -> str:
    """`text` in lower case, without punctuation, articles and surplus space.

    The rule of SQuAD's evaluation script (Rajpurkar et al. 2016, arXiv 1606.05250): ASCII punctuation is dropped, not
    replaced, so "3.5" becomes "35" and "-5" becomes "5".
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the option that `text` names by its letter or, word for word, by its normalised text; or None."""
    text = text.strip()
    letter = _LETTER.match(text)
    if letter and (letter[1] or letter[2]).upper() in LETTERS[: len(choices)]:
        return (letter[1] or letter[2]).upper()
    same = [letter for letter, choice in zip(LETTERS, choices, strict=False) if normalise(choice) == normalise(text)]
    return same[0] if len(same) == 1 and normalise(text) else None


def is_right(said: str, answer: str, match: str, choices: Sequence[str] = ()) -> bool:
    """Whether `said` is the `answer`. `match`: "exact" (but for space around it), "normalised" or "choice"."""
    if match == "exact":
        return said.strip() == answer.strip()
    if match == "normalised":
        return normalise(said) == normalise(answer)
    return chosen(said, choices) == chosen(answer, choices) is not None
