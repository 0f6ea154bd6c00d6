"""The report as Markdown, and its summary as a LaTeX table."""

from collections.abc import Iterator, Sequence

from splitveil.report import checks, sentences, tables
from splitveil.report.pictures import Picture, Pictures
from splitveil.report.subject import Subject
from splitveil.report.words import Said, markdown_text, said, word

TEX_COLUMNS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)  # client cost is left to the page
SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "–": "--",
}  # fmt: skip


def tex_text(value: str) -> str:
    r"""Text that LaTeX sets as it is, on one line.

    >>> tex_text("a_b & 50 %")
    'a\\_b \\& 50 \\%'
    """
    return "".join(SIGNS.get(sign, sign) for sign in " ".join(value.split()))


def latex(subject: Subject) -> str:
    """The summary as a table for `booktabs`."""
    lang = subject.lang
    columns = [tables.columns(lang)[at] for at in TEX_COLUMNS]
    packages = "booktabs" + ("" if lang == "en" else ", ctex")
    lines = [
        f"% {said('tex.needs', packages=packages).plain(lang)}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex_text(word('tex.caption', lang))}}}",
        rf"\begin{{tabular}}{{{''.join('r' if c.numeric else 'l' for c in columns)}}}",
        r"\toprule",
        " & ".join(tex_text(column.label) for column in columns) + r" \\",
        r"\midrule",
    ]
    for row in subject.rows:
        cells = tables.format_row(row)
        lines.append(" & ".join(tex_text(cells[at]) for at in TEX_COLUMNS) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def markdown(subject: Subject, pictures: Pictures) -> str:
    """The whole report as Markdown; its pictures are the PNGs beside it."""
    parts = [
        f"# {markdown_text(subject.heading)}",
        *_opening(subject),
        *_measured(subject, pictures),
        *_audit(subject),
        *_attacks(subject, pictures),
        *_training(subject, pictures),
        *_closing(subject),
    ]
    return "\n\n".join(parts) + "\n"


def _opening(subject: Subject) -> Iterator[str]:
    lang, skipped = subject.lang, subject.skipped
    yield f"**{sentences.verdict(subject.runs).markdown(lang)}**"
    yield sentences.statement(subject.runs).markdown(lang)
    if skipped:
        yield said("note.skipped", count=str(len(skipped))).markdown(lang)
        yield _bullets([f"{markdown_text(path)}: {markdown_text(why)}" for path, why in skipped])


def _measured(subject: Subject, pictures: Pictures) -> Iterator[str]:
    lang = subject.lang
    yield _head("summary", subject)
    yield said("note.arrows").markdown(lang)
    yield table(tables.columns(lang), [tables.format_row(row) for row in subject.rows])
    if pictures.tradeoff:
        yield _head("tradeoff", subject)
        yield _picture(pictures.tradeoff, said("alt.tradeoff"), subject)
        yield said("caption.tradeoff").markdown(lang)
    if subject.sources:
        yield subject.sources.markdown(lang)
    if pictures.grid:
        yield _head("pictures", subject)
        yield _picture(pictures.grid, said("alt.grid"), subject)
        yield said("caption.grid").markdown(lang)


def _attacks(subject: Subject, pictures: Pictures) -> Iterator[str]:
    lang, sheet, repeats = subject.lang, subject.leaks, subject.repeats
    if pictures.attacks:
        yield _head("attacks", subject)
        yield _picture(pictures.attacks, said("alt.attacks"), subject)
        rows = [row for run in subject.runs for row in tables.attack_rows(run, lang)]
        cells = [tables.format_attack_row(row, lang) for row in rows]
        yield table(tables.attack_columns(lang), cells)
    if sheet:
        yield _head("leaks", subject)
        yield table(sheet.columns, [[row[0][1:-1], *row[1:]] for row in sheet.rows])
        yield said("leaks.caption").markdown(lang)
    if repeats:
        yield f"### {repeats.title}"
        yield table(repeats.columns, [[row[0][1:-1], *row[1:]] for row in repeats.rows])
        yield said("repeats.caption").markdown(lang)


def _training(subject: Subject, pictures: Pictures) -> Iterator[str]:
    if pictures.curves:
        yield _head("training", subject)
        yield said("caption.curves").markdown(subject.lang)
    for picture in pictures.curves:
        yield _picture(picture, said("alt.curves", names=picture.runs), subject)


def _closing(subject: Subject) -> Iterator[str]:
    lang = subject.lang
    yield _head("believe", subject)
    yield _bullets([caveat.markdown(lang) for caveat in sentences.caveats(subject.runs)])
    yield _head("passports", subject)
    names = (word("column.key", lang), word("column.value", lang))
    columns = tuple(tables.Column(heading=name, numeric=False) for name in names)
    for run in subject.runs:
        yield f"### {markdown_text(run.name)}"
        pairs = sentences.passport(run)
        yield table(columns, pairs) if pairs else said("note.no-record").markdown(lang)
    yield said("footer").markdown(lang)


def _audit(subject: Subject) -> Iterator[str]:
    """Flags and certificates, where the records have them."""
    runs, lang = subject.runs, subject.lang
    if not checks.audited(runs):
        return
    yield _head("audit", subject)
    yield table(checks.audit_columns(lang), [checks.audit_row(run, lang) for run in runs])
    yield said("caption.audit").markdown(lang)
    told = [
        f"{markdown_text(run.name)}: **{markdown_text(checks.written(flag.title, lang))}**: "
        f"{markdown_text(flag.seen)}; {markdown_text(checks.written(flag.remedy, lang))}"
        for run in runs
        for flag in checks.flags_of(run) or ()
    ]
    told += [
        f"{markdown_text(', '.join(names))}: {markdown_text(reason)}"
        for names, _, reason in checks.refusals(runs)
    ]
    if told:
        yield _bullets(told)


def table(columns: Sequence[tables.Column], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; no cell can break out of it."""
    lines = [[column.label for column in columns]]
    lines.append(["--:" if column.numeric else "---" for column in columns])
    lines += [[markdown_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(key: str, subject: Subject) -> str:
    return f"## {word(f'heading.{key}', subject.lang)}"


def _picture(picture: Picture, alt: Said, subject: Subject) -> str:
    return f"![{alt.markdown(subject.lang)}]({picture.stem}.png)"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
