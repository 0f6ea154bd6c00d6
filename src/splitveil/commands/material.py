"""What `splitveil audit MODULE:FUNCTION` is told: callables, images, training data, attributes."""

from pathlib import Path
from typing import TYPE_CHECKING

from splitveil.imports import find_object

if TYPE_CHECKING:
    from torch import Tensor

    from splitveil.audits.own_encoder import Material, Target
    from splitveil.data import Dataset

Kind = tuple[tuple[str, ...], tuple[int, ...]]  # classes, and shape of an image


def find_target(
    name: str, server: str | None, noise: float | None, given: str, *, white_box: bool
) -> "Target":
    """The callables that are named, as what is to be audited."""
    from typing import get_args

    from splitveil.audits.own_encoder import Target
    from splitveil.audits.stranger import Given
    from splitveil.errors import ConfigError, unknown

    if given not in get_args(Given):
        raise ConfigError(unknown("input", given, get_args(Given)))
    return Target(
        client=find_safely(name, "what is audited"),
        name=name,
        server=None if server is None else find_safely(server, "--server"),
        server_name=server,
        noise_std=noise,
        white_box=white_box,
        given=given,  # type: ignore[arg-type]  # one of them, as was checked
    )


def find_safely(name: str, what: str) -> object:
    """What MODULE:FUNCTION stands for; its import may neither end this process nor change torch."""
    from splitveil.audits.stranger import unchanged
    from splitveil.errors import ConfigError

    try:
        with unchanged():
            found: object = find_object(name, what)
    except SystemExit as err:
        raise ConfigError(
            f"'{name.partition(':')[0]}' ends the process when it is imported (exit {err.code}); "
            "put what it does as a script below: if __name__ == '__main__':"
        ) from err
    return found


def material(
    data: str | None,
    aux_data: str | None,
    test_data: str | None,
    aux: str,
    *,
    members: str | None = None,
    attributes: Path | None = None,
) -> "Material":
    """The images of an audit, with those known to be training data and a table of attributes."""
    from splitveil.data import load

    if data is None and aux_data is not None and test_data is not None:
        found = two_sets(load(aux_data), load(test_data), test_data, attributes)
    else:
        found = one_set(data, aux, attributes, alone=aux_data is None and test_data is None)
    return found if members is None else with_members(found, load(members))


def one_set(data: str | None, aux: str, attributes: Path | None, *, alone: bool) -> "Material":
    """One dataset divided into its parts."""
    from splitveil.audit.tables import attributes_of, read_table
    from splitveil.audits.own_encoder import Material
    from splitveil.data import aux_view, load, make_splits
    from splitveil.data.folder import file_names
    from splitveil.errors import ConfigError
    from splitveil.runs import fingerprint

    if data is None or not alone:
        raise ConfigError(
            "give --data, whose training part the attacker knows and whose test part is scored, "
            "or both --aux-data and --test-data: folder:PATH, npz:PATH or a dataset's name"
        )
    if aux not in ("train", "test90"):
        raise ConfigError(
            f"--aux must be train or test90 for a callable, got '{aux}'; for an attacker with "
            "images of his own give --aux-data and --test-data"
        )
    dataset = load(data)
    splits = make_splits(dataset, final=True)
    view = aux_view(dataset, splits, aux)
    table = None
    if attributes is not None:
        rows = read_table(attributes, len(dataset), file_names(data))
        table = attributes_of(attributes, rows, view.aux, view.scored)
    return Material(
        name=data,
        classes=dataset.classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        test=dataset.labelled(splits.test),
        knowledge=aux,
        hashes=splits.hashes() | view.hashes() | {"data": fingerprint(dataset)},
        attributes=table,
    )


def two_sets(
    known: "Dataset", scored: "Dataset", name: str, attributes: Path | None = None
) -> "Material":
    """Every image of the first for the attacker, every image of the second to score."""
    import torch

    from splitveil.audit.tables import attributes_of, read_table
    from splitveil.audits.own_encoder import Material
    from splitveil.data.splits import hash_all
    from splitveil.errors import DataError
    from splitveil.runs import fingerprint

    kinds = ((d.classes, d.image_shape) for d in (known, scored))
    check_agree("--aux-data", next(kinds), "--test-data", next(kinds))
    if count := shared(known, scored.images):
        raise DataError(
            f"{count} images of --test-data are in --aux-data too; the attacker may not know "
            "the images that are scored"
        )
    aux, test = (d.labelled(torch.arange(len(d))) for d in (known, scored))
    indices = {"aux": torch.arange(len(known)), "scored": torch.arange(len(scored))}
    table = None
    if attributes is not None:  # the rows of the attacker's images, then those of the others
        rows = read_table(attributes, len(known) + len(scored))
        table = attributes_of(attributes, rows, indices["aux"], len(known) + indices["scored"])
    return Material(
        name=name,
        classes=scored.classes,
        aux=aux,
        scored=test,
        test=test,
        knowledge="aux-data",
        hashes=hash_all(indices | {"test": indices["scored"]})
        | {"data": fingerprint(scored), "aux_data": fingerprint(known)},
        attributes=table,
    )


def with_members(found: "Material", members: "Dataset") -> "Material":
    """The same images, and those the client was trained on; none of them may be scored."""
    from dataclasses import replace

    import torch

    from splitveil.errors import DataError
    from splitveil.runs import fingerprint

    shape = tuple(found.test.images.shape[1:])
    ours = (members.classes, members.image_shape)
    check_agree("--members", ours, "--data or --test-data", (found.classes, shape))
    levels = found.test.images.mul(255).round().to(torch.uint8)
    if count := shared(members, levels):
        raise DataError(
            f"{count} images of --members are among those that are scored; a client is not "
            "scored on what it was trained on: divide the images yourself"
        )
    return replace(
        found,
        members=members.labelled(torch.arange(len(members))),
        hashes=found.hashes | {"members": fingerprint(members)},
    )


def check_agree(one: str, first: Kind, other: str, second: Kind) -> None:
    """Refuse two sets of images of other classes or shapes."""
    from splitveil.errors import DataError

    for what, here, there in zip(("classes", "images of shape"), first, second, strict=True):
        if here != there:
            raise DataError(f"{one} has {what} {here}, {other} {there}; they must agree")


def shared(known: "Dataset", images: "Tensor") -> int:
    """How many of some images (n, c, h, w) of bytes a dataset has too."""
    seen = {image.tobytes() for image in known.images.numpy()}
    return sum(image.tobytes() in seen for image in images.numpy())
