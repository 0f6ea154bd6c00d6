"""What the pages name exists: files, commands, options, objects, links; every page is listed."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from documents import DOCS, FENCE, ROOT, prose, read

from splitveil.cli.app import app

PACKAGE = ROOT / "src" / "splitveil"
PAGES = sorted(DOCS.glob("*/**/*.md"))
OLD_ADDRESSES = sorted(set(DOCS.glob("*.md")) - {DOCS / "README.md"})
FRONT = [ROOT / "README.md", ROOT / "README.zh.md", DOCS / "README.md"]
CHECKED = [*PAGES, *FRONT, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
ROOMS = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE_TYPES = {"csv", "html", "json", "jsonl", "md", "npz", "onnx", "pdf", "png", "py", "svg", "tex"}
FILE_TYPES |= {"log", "toml"}
NOT_OURS = {"model_training_paral_pruning.py"}  # a script that the reference documents name
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

every_page = pytest.mark.parametrize("path", CHECKED, ids=lambda p: p.relative_to(ROOT).as_posix())
# The changelog tells of what is gone too.
every_page_of_today = pytest.mark.parametrize(
    "path", CHECKED[:-1], ids=lambda p: p.relative_to(ROOT).as_posix()
)


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def spans(path: Path) -> list[str]:
    """Inline code outside fences."""
    return INLINE.findall(prose(path.read_text(encoding="utf-8")))


def links(path: Path) -> list[tuple[Path, str]]:
    """Files and anchors that a page links to, within the repository."""
    found = [link for link in LINK.findall(prose(path.read_text("utf-8"))) if "://" not in link]
    parts = [link.partition("#") for link in found]
    return [((path.parent / file).resolve() if file else path, anchor) for file, _, anchor in parts]


@every_page_of_today
def test_named_files_exist(path: Path) -> None:
    pattern = r"(src|tests|docs|splitveil)/[\w./-]*|[\w/-]+\.py|[a-z]+/"
    named = {span for span in spans(path) if re.fullmatch(pattern, span)} - NOT_OURS
    places = (ROOT, ROOT / "src", PACKAGE)
    assert not {n for n in named if not any((place / n).exists() for place in places)}


def commands() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    group: Any = typer.main.get_command(app)
    return {
        name: {option for p in command.params for option in p.opts if option.startswith("-")}
        | {"--help"}
        for name, command in group.commands.items()
    }


@every_page_of_today
def test_named_commands_and_options_exist(path: Path) -> None:
    known = commands()
    every = set().union(*known.values()) | {"--version"}
    fences = FENCE.finditer(path.read_text(encoding="utf-8"))
    lines = spans(path) + [line for m in fences if m[1] != "python" for line in m[2].split("\n")]
    for line in (part for one in lines for part in one.split(" && ")):
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line))
        if call := re.match(r"splitveil ([a-z][\w-]*)", line):
            assert call[1] in known, line
            assert options <= known[call[1]], line
        elif not re.match(r"make |mypy", line) and "mypy" not in line:
            assert options <= every, line


@every_page_of_today
def test_dotted_names_resolve(path: Path) -> None:
    for span in spans(path):
        name = span.removeprefix("sv.").removeprefix("splitveil.")
        first, *rest = name.split(".")
        named = re.fullmatch(r"[\w.]+", name) and first in ROOMS and rest
        if not named or rest[-1] in FILE_TYPES:
            continue
        found: Any = import_module(f"splitveil.{first}")
        for i, part in enumerate(rest):
            if not hasattr(found, part):
                found = import_module(f"splitveil.{first}.{'.'.join(rest[: i + 1])}")
            else:
                found = getattr(found, part)


@every_page
def test_links_resolve(path: Path) -> None:
    for target, anchor in links(path):
        assert target.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target.read_text(encoding="utf-8")), re.M)
            assert anchor in {slug(h) for h in headings}, f"{target}#{anchor}"


def test_the_index_leads_to_every_page_with_one_line_each() -> None:
    lines = [line for line in read("README.md").splitlines() if line.startswith("- ")]
    listed = [(DOCS / LINK.findall(line)[0]).resolve() for line in lines]
    assert len(listed) == len(set(listed))
    reached, ahead = set(listed), [*listed, ROOT / "README.zh.md"]
    while ahead:
        page = ahead.pop()
        found = {target for target, _ in links(page)} if page.is_file() else set()
        ahead += sorted(found & set(PAGES) - reached)
        reached |= found
    assert not sorted(p.relative_to(DOCS).as_posix() for p in set(PAGES) - reached)


def test_old_addresses_point_to_existing_pages() -> None:
    assert OLD_ADDRESSES
    for path in OLD_ADDRESSES:
        [(target, anchor)] = links(path)
        assert target in PAGES, path
        assert not anchor
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*/*.md")), ids=lambda p: p.relative_to(DOCS).as_posix()
)
def test_a_page_begins_with_what_it_is_for(path: Path) -> None:
    """A title, then a paragraph of at least two sentences: no table, code or heading."""
    title, first, *_ = path.read_text(encoding="utf-8").split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert not re.match(r"[|`#$<-]", first)
    assert len(re.findall(r"[.:?](?=\s|$)|[。：；]", first)) > 1
