"""`docs/reference/flags.md` explains every flag an audit can raise."""

import re
from pathlib import Path

import pytest

from splitveil.audits.flags import FLAGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "flags.md"


def sections() -> dict[str, str]:
    """Level-2 headings, without backticks, and the text below each."""
    parts = re.split(r"^## +(.+?) *$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name.strip("`"): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_headings_are_the_flags() -> None:
    assert set(FLAGS) <= set(sections())


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_says_when_why_and_what_to_do(flag: str) -> None:
    text = sections()[flag]
    for words in ("Raised if", "Explanation", "What to do"):
        assert words in text, f"'{words}' is missing under '{flag}'"
