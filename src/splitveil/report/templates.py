"""Templates filled with words: every string is escaped, and the script is named by its hash."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from splitveil.report.words import LANGS, Lang, Said, Value, listed, said


def resource(name: str) -> str:
    """The text of a file that ships with this package."""
    return resources.files("splitveil.report").joinpath(name).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """What a page may do: run this one script, show pictures it carries, and reach nobody."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def fill(name: str, lang: Lang, script: str, **content: object) -> str:
    """The template `name` with everything in its place."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def say(key: str, **values: Value) -> Markup:
        return told(said(key, **values))

    def told(sentence: Said) -> Markup:
        return Markup(sentence.html(lang))  # noqa: S704 - values are escaped, patterns are ours

    def plain(key: str, **values: Value) -> str:
        return said(key, **values).plain(lang)

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(resource),
    )

    def row(names: Sequence[str]) -> str:
        return listed(names, lang)

    words = {"say": say, "told": told, "plain": plain, "row": row, "html_lang": LANGS[lang]}
    environment.globals |= words
    source = resource(script)
    page: str = environment.get_template(name).render(
        script=Markup(source),  # noqa: S704 - our own file
        policy=policy(source),
        **content,
    )
    return page
