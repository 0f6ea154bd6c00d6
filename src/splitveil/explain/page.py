"""One page of pictures about one run: no script, no network, pictures inside and beside it."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitveil.report.page import put_all

PAGE = "explain.html"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture with its words; without a picture, `text` says why there is none."""

    title: str
    text: str
    file: str = ""
    png: bytes | None = None

    @property
    def uri(self) -> str:
        """The picture as a data: address."""
        return "data:image/png;base64," + base64.b64encode(self.png or b"").decode("ascii")


def render(title: str, lead: str, panels: Sequence[Panel]) -> str:
    """The page as HTML text; every string is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = PackageLoader("splitveil.insight")
    environment = Environment(
        loader=pages, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("explain.html.j2").render(title=title, lead=lead, panels=panels)


def write_page(folder: Path, title: str, lead: str, panels: Sequence[Panel]) -> list[Path]:
    """Write the page and its pictures into a folder; returns their paths, the page first."""
    contents = {folder / PAGE: render(title, lead, panels).encode("utf-8")}
    contents |= {folder / panel.file: panel.png for panel in panels if panel.png}
    return put_all(folder, contents)
