"""The trade-off of our own tables: each row a mark, then what is published of the dataset."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from splitveil.errors import RunError
from splitveil.record.groups import Group, aux_of, dataset_of, defences_of
from splitveil.report.canvas import CEILING, CEILING_TEXT, GREY, INK, PALETTE, shown
from splitveil.report.columns import Published
from splitveil.report.figures import Mark, draw_tradeoff

OURS = Mark(name="", accuracy=0.0, mse=0.0, ink=PALETTE[0])
OTHER = replace(OURS, ink=PALETTE[1])
PUBLISHED = replace(OURS, ink=INK, hollow=True)
THIN = replace(PUBLISHED, ink=GREY, shape="s")


def marks(groups: Sequence[Group], published: Mapping[str, Published]) -> list[Mark]:
    """What the attacker with the training set gets from each row, then what is published of it.

    A square is a client other than VGG11's. Published rows of another dataset are left out.
    """
    made = []
    for group in groups:
        accuracies = [100 * v for v in group.values("accuracy") if v is not None]
        errors = [v for v in group.values("strongest.mse") if v is not None]
        if aux_of(group) != "train" or not accuracies or not errors:
            continue
        made.append(
            replace(
                OURS if "veil" in defences_of(group) else OTHER,
                name=shown(group.name, 30),
                accuracy=statistics.fmean(accuracies),
                mse=statistics.fmean(errors),
                accuracy_sd=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                mse_sd=statistics.stdev(errors) if len(errors) > 1 else None,
                shape="o" if group.distinct("config.net") == ["vgg11"] else "s",
            )
        )
    datasets = {dataset_of(group) for group in groups}
    for said in published.values():
        if said.aux == "train" and said.is_of(datasets):
            name = shown(said.source.rpartition(", ")[2], 30)
            made.append(replace(PUBLISHED, name=name, accuracy=100 * said.accuracy, mse=said.mse))
    return made


def tradeoff(points: Sequence[Mark], ceiling: float) -> bytes:
    """PNG: accuracy (x, %) against the strongest attack's MSE (y), with the label-only ceiling."""
    if not points:
        raise RunError("no row has both an accuracy and a strongest attack; audit a run first")
    legend = [
        (OURS, "veil, measured"),
        (OTHER, "other, measured"),
        (PUBLISHED, "published"),
        (THIN, "square: thin client"),
    ]
    return draw_tradeoff(points, [(ceiling, CEILING_TEXT, CEILING, "--")], legend).png
