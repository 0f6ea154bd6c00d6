"""Everything a reader of a report sees, in two languages: `locale/en.toml` and `zh.toml`.

A `Sentence` is a key of these files with the values for its placeholders. Language and form (plain
text or HTML) are chosen when it is written.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from typing import Literal, Union

from splitveil.errors import ConfigError, unknown

Lang = Literal["en", "zh"]
LANGS: Mapping[Lang, str] = {"en": "en", "zh": "zh-CN"}  # as `<html lang>` has them
BETWEEN: Mapping[Lang, str] = {"en": ", ", "zh": "、"}
APART: Mapping[Lang, str] = {"en": " ", "zh": ""}  # between two sentences

Value = Union[str, "Sentence", tuple[str, ...]]


def read_locale(lang: Lang) -> dict[str, str]:
    """The words of a language by their keys; those of a TOML table start with its name."""
    file = resources.files("splitveil.report").joinpath("locale", f"{lang}.toml")
    words: dict[str, str] = {}
    for key, value in tomllib.loads(file.read_text(encoding="utf-8")).items():
        inner = value.items() if isinstance(value, dict) else ()
        words |= {f"{key}.{name}": text for name, text in inner} or {key: value}
    return words


LOCALE: Mapping[Lang, Mapping[str, str]] = {lang: read_locale(lang) for lang in LANGS}
TERMS = tuple(key.removeprefix("term.") for key in LOCALE["en"] if key.startswith("term."))


@dataclass(frozen=True)
class Sentence:
    """A sentence before it is written.

    Args:
        key: Its key in the locale files.
        values: A text, several texts or another sentence for each placeholder.
    """

    key: str
    values: Mapping[str, Value] = field(default_factory=dict)

    def plain(self, lang: Lang = "en") -> str:
        """As text without marks.

        >>> sentence("gallery.original").plain("zh")
        '原图'
        """
        return self._dressed(lang, lambda pattern: re.sub(r"`|\*\*", "", pattern), str)

    def html(self, lang: Lang = "en") -> str:
        """As HTML: `code` and **strong** become tags, every value is escaped."""
        return self._dressed(lang, _tags, escape)

    def _dressed(
        self, lang: Lang, pattern: Callable[[str], str], value: Callable[[str], str]
    ) -> str:
        def written(given: Value) -> str:
            if isinstance(given, Sentence):
                return given._dressed(lang, pattern, value)
            return value(given if isinstance(given, str) else BETWEEN[lang].join(given))

        return pattern(word(self.key, lang)).format(
            **{k: written(v) for k, v in self.values.items()}
        )


def sentence(key: str, **values: Value) -> Sentence:
    """A sentence of the table with its values."""
    return Sentence(key, values)


def written(value: object, lang: Lang) -> str:
    """A value of a sentence, or of a record, as plain text."""
    return value.plain(lang) if isinstance(value, Sentence) else str(value)


def translated(text: str, lang: Lang) -> str:
    """A text that was made or stored in English, in a language; itself where no pattern fits.

    Records hold English sentences, with numbers and names in them. The English entries of `[seen]`,
    `[why]` and `[box]` are patterns of such sentences; the other languages have them with the same
    placeholders.

    >>> translated("3 of 5 steps were trained", "zh")
    '5 步中只训练了 3 步'
    """
    if lang == "en":
        return text
    for key, pattern in _patterns():
        if found := pattern.fullmatch(text):
            values = {name: translated(value, lang) for name, value in found.groupdict().items()}
            return word(key, lang).format(**values)
    return text


RECORDED = ("seen", "why", "box")


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """The English entries that can be recognised, those with most words of their own first."""
    keys = [key for key in LOCALE["en"] if key.partition(".")[0] in RECORDED]
    keys.sort(key=lambda key: -len(re.sub(r"\{\w+\}", "", LOCALE["en"][key])))
    return [(key, _pattern(LOCALE["en"][key])) for key in keys]


def _pattern(entry: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", entry)
    made = [f"(?P<{part}>.+?)" if at % 2 else re.escape(part) for at, part in enumerate(parts)]
    return re.compile("".join(made), re.DOTALL)


def word(key: str, lang: Lang = "en") -> str:
    """An entry of the table as it stands.

    >>> word("column.leakage"), word("column.leakage", "zh")
    ('Leakage', '泄露')
    """
    if key not in LOCALE[lang]:
        raise KeyError(f"report/locale/{lang}.toml has no '{key}'; add it to every language")
    return LOCALE[lang][key]


def joined(items: Sequence[str], lang: Lang) -> str:
    """Names in a row."""
    return BETWEEN[lang].join(items)


def language(name: str) -> Lang:
    """The language of a name; raises ConfigError naming those there are."""
    for lang in LANGS:
        if lang == name:
            return lang
    raise ConfigError(unknown("language", name, LANGS))


def _tags(pattern: str) -> str:
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(pattern, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe)
