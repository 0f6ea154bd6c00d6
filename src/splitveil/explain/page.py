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


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f8fa; --card: #ffffff; --ink: #1f2933; --soft: #55616d; --rule: #d5dbe1;
  --accent: #005a9c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161b; --card: #1b2128; --ink: #e6eaee; --soft: #a3aeb9; --rule: #323b45;
    --accent: #7ab8f5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1208px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 44px 0 12px; }
p { margin: 0 0 12px; max-width: 78ch; overflow-wrap: anywhere; }
.lead { font-size: 1.1rem; color: var(--soft); }
figure { margin: 0 0 12px; }
.sheet { background: #fff; border: 1px solid var(--rule); border-radius: 12px; padding: 12px;
  overflow-x: auto; }
.sheet:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { color: var(--soft); font-size: .95rem; margin-top: 10px; max-width: 82ch; }
.note { background: var(--card); border: 1px dashed var(--rule); border-radius: 8px;
  padding: 10px 14px; color: var(--soft); max-width: none; }
footer { margin-top: 48px; color: var(--soft); font-size: .875rem; }
@media (max-width: 560px) {
  main { padding: 24px 16px 48px; }
  img { max-width: none; width: 700px; }
}
@media print { body { background: #fff; } figure { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header>
<h1>{{ title }}</h1>
<p class="lead">{{ lead }}</p>
</header>
{% for panel in panels %}
<section>
<h2>{{ panel.title }}</h2>
{% if panel.png %}
<figure>
<div class="sheet" tabindex="0" role="region" aria-label="{{ panel.title }}"><img alt="{{ panel.title }}. {{ panel.text }}" src="{{ panel.uri }}"></div>
<figcaption>{{ panel.text }}</figcaption>
</figure>
{% else %}
<p class="note">{{ panel.text }}</p>
{% endif %}
</section>
{% endfor %}
<footer>Written by SplitVeil from the files of the run; the same files give the same page.</footer>
</main>
</body>
</html>
"""  # noqa: E501 - HTML


def render(title: str, lead: str, panels: Sequence[Panel]) -> str:
    """The page as HTML text; every string is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page: str = environment.from_string(TEMPLATE).render(title=title, lead=lead, panels=panels)
    return page


def write_page(folder: Path, title: str, lead: str, panels: Sequence[Panel]) -> list[Path]:
    """Write the page and its pictures into a folder; returns their paths, the page first."""
    contents = {folder / PAGE: render(title, lead, panels).encode("utf-8")}
    contents |= {folder / panel.file: panel.png for panel in panels if panel.png}
    return put_all(folder, contents)
