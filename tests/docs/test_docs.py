"""The documents tell the truth: their code runs, and what they name exists."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from documents import FENCE, ROOT, table

from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES
from splitveil.cli.app import app

PACKAGE = ROOT / "src" / "splitveil"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
ROOMS = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE_TYPES = (
    "csv",
    "html",
    "json",
    "jsonl",
    "md",
    "npz",
    "onnx",
    "pdf",
    "png",
    "py",
    "svg",
    "tex",
    "toml",
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    return FENCE.sub("", text)


def sections(name: str) -> Iterator[tuple[str, str]]:
    """Title and text of each section of the second level."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    fenced = [m.span() for m in FENCE.finditer(text)]
    starts = [
        m
        for m in re.finditer(r"^## (.+)$", text, re.M)
        if not any(a < m.start() < b for a, b in fenced)
    ]
    ends = [m.start() for m in starts[1:]] + [len(text)]
    for start, end in zip(starts, ends, strict=True):
        yield start[1], text[start.end() : end]


def python_blocks(text: str) -> list[str]:
    return [m[2] for m in FENCE.finditer(text) if m[1] == "python"]


RUNNABLE = [
    pytest.param(name, title, python_blocks(text), id=f"{name}: {title}")
    for name in ("project/adding.md", "project/errata.md")
    for title, text in sections(name)
    if python_blocks(text)
]


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def spans(text: str) -> list[str]:
    """Inline code outside fences."""
    return INLINE.findall(prose(text))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, by much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "title", "blocks"), RUNNABLE)
def test_the_code_of_a_section_runs(
    name: str, title: str, blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": f"docs.{slug(title)}"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{name}, {title}, block {number}", "exec"), namespace)  # noqa: S102
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_every_section_that_adds_something_has_code() -> None:
    with_code = [p.values[1] for p in RUNNABLE if p.values[0] == "project/adding.md"]
    assert with_code == [title for title, _ in sections("project/adding.md")]


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_files_that_are_named_exist(path: Path) -> None:
    named = {
        span
        for span in spans(path.read_text(encoding="utf-8"))
        if re.fullmatch(r"(src|tests|docs|splitveil)/[\w./-]*|[\w/-]+\.py|[a-z]+/", span)
    }
    places = (ROOT, ROOT / "src", PACKAGE)
    missing = {n for n in named if not any((place / n).exists() for place in places)}
    assert not missing


def commands() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    group: Any = typer.main.get_command(app)
    return {
        name: {option for p in command.params for option in p.opts if option.startswith("-")}
        | {"--help"}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_commands_and_options_that_are_named_exist(path: Path) -> None:
    known = commands()
    every = set().union(*known.values()) | {"--version"}
    text = path.read_text(encoding="utf-8")
    lines = spans(text) + [
        line for m in FENCE.finditer(text) if m[1] != "python" for line in m[2].split("\n")
    ]
    for line in lines:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line))
        if call := re.match(r"splitveil ([a-z][\w-]*)", line):
            assert call[1] in known, line
            assert options <= known[call[1]], line
        elif not re.match(r"make |mypy", line) and "mypy" not in line:
            assert options <= every, line


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_dotted_names_resolve(path: Path) -> None:
    for span in spans(path.read_text(encoding="utf-8")):
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


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_relative_links_resolve(path: Path) -> None:
    for link in LINK.findall(prose(path.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target.read_text(encoding="utf-8")), re.M)
            assert anchor in {slug(h) for h in headings}, link


def test_the_budgets_of_the_protocol_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    printed = {
        row[0]: (*map(int, row[1:6]), float(row[6]), float(row[7]), row[8])
        for row in table(text, "profile")
    }
    real = {}
    for name, attacks in PROFILES.items():
        left_out = {"quick": {"decoder-large", "gan"}, "standard": {"gan"}}
        assert set(ATTACKS) - set(attacks) == left_out.get(name, set())
        d = attacks["decoder"]
        assert isinstance(d, Decoder)
        real[name] = (
            *(d.blocks, d.width, d.epochs, d.min_steps, d.batch_size),
            *(d.lr, d.weight_decay, d.schedule),
        )
    assert printed == real


def test_the_attacks_of_the_protocol_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    printed = {row[0]: row[1] for row in table(text, "attack")}
    paper = PROFILES["paper"]
    assert printed == {name: str(paper[name].access) for name in ATTACKS}
