"""A page read back: tags that nest, rows of tables, headings, visible words."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "hr", "input"}
SPOKEN = {"alt", "aria-label", "title", "placeholder"}


class Page(HTMLParser):
    """Tags, attributes, table rows and second-level headings; checks that tags nest.

    `words` are the visible texts and spoken attributes outside of code and of `lang="en"`.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def _inside(self, *tags: str) -> bool:
        return any(tag in tags for tag, _ in self.open)

    def _quoted(self) -> bool:
        return self._inside("code") or any(a.get("lang") == "en" for _, a in self.open[1:])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.words += [value or "" for name, value in attrs if name in SPOKEN]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "h2":
            self.headings.append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._inside("style", "script"):
            return
        self.text += data.replace("\N{NO-BREAK SPACE}", " ")
        if not self._quoted():
            self.words.append(data)
        if self._inside("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside("h2"):
            self.headings[-1] += data

    @property
    def flat(self) -> str:
        """All text with single spaces."""
        return " ".join(self.text.split())
