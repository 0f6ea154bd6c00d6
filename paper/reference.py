"""The section of this repository's own results page about a reproduced experiment."""

from collections.abc import Sequence

from paper.claims import claim_lines
from splitveil.experiments.reproduction import LAYER, Experiment, comparable, group_table
from splitveil.record.groups import Group

LAYER_KINDS = ("", "-wire")  # rows of the second kind have the layer behind the client


def claims(experiment: Experiment, groups: Sequence[Group]) -> list[str]:
    """What holds of what the experiment's authors report, and what does not."""
    beside = experiment.reported if comparable(experiment, groups) else {}
    reported = {name.removesuffix(f"-{experiment.aux}"): said for name, said in beside.items()}
    return claim_lines(groups, reported, experiment.against, LAYER, LAYER_KINDS)


def section(experiment: Experiment, groups: Sequence[Group]) -> str:
    """Table, what holds and what does not, what is missing: Markdown."""
    made, rows = group_table(experiment, groups)
    parts = [made.render(rows, "markdown", level=3).strip()]
    if said := claims(experiment, groups):
        parts.append("What holds and what does not:\n\n" + "\n".join(f"- {line}" for line in said))
    known = {group.name for group in groups}
    if absent := [f"`{row}`" for row in experiment.rows if row not in known]:
        parts.append(f"No record yet: {', '.join(absent)}.")
    return "\n\n".join(parts)
