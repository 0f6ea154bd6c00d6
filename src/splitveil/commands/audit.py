"""`splitveil audit`: of a run, or of anybody's encoder given as MODULE:FUNCTION."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitveil import commands
from splitveil.imports import current_folder_first, find_object

if TYPE_CHECKING:
    from splitveil.data import Dataset
    from splitveil.foreign import Material, Target


def audit(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: Annotated[
        Path | None, typer.Argument(help="Folder of the run, or MODULE:FUNCTION.")
    ] = None,
    profile: Annotated[str, typer.Option(help="smoke, quick, standard or paper.")] = "quick",
    aux: Annotated[str, typer.Option(help="train, held-out or test90.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Measure a record again and say what differs.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run every attack, also those finished before.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="MODULE:FUNCTION's images: folder:PATH, npz:PATH or a dataset's name."),
    ] = None,
    aux_data: Annotated[
        str | None, typer.Option(help="In place of --data: all the attacker's images.")
    ] = None,
    test_data: Annotated[
        str | None, typer.Option(help="In place of --data: all the images to score.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="MODULE:FUNCTION that answers what was sent.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Deviation of the Gaussian noise the client adds last.")
    ] = None,
    white_box: Annotated[
        bool, typer.Option("--white-box", help="The attacker has the client's networks.")
    ] = False,
    given: Annotated[
        str, typer.Option("--input", help="What the function takes: auto, numpy or torch.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results (default: runs/FUNCTION).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Attack a run and write `record.json` and `report.html` into its folder.

    An interrupted audit continues with the attack it was at.

    Example: `splitveil audit runs/first --profile quick`

    Or attack anybody's encoder, a function from images to what leaves the client.

    Example: `splitveil audit mycode:send --data folder:photos --server mycode:answer`
    """
    from splitveil.console import setup_logging
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()
    theirs = {
        "--data": data, "--aux-data": aux_data, "--test-data": test_data, "--server": server,
        "--noise": noise, "--white-box": white_box or None, "--out": out,
        "--input": None if given == "auto" else given,
    }  # fmt: skip
    if not is_callable(run):
        refuse_options(theirs, "MODULE:FUNCTION is audited, as mycode:send; a run has its own")
        audit_run(run, profile, aux, seed, replay, fresh=fresh, json_=json_)
        return
    refuse_options({"--replay": replay}, "a run is audited; audit the function again instead")
    with current_folder_first():
        target = find_target(str(run), server, noise, given, white_box=white_box)
        folder = folder_for(target.name, out)
        images = material(data, aux_data, test_data, aux)
        audit_callable(target, images, folder, profile, seed, json_=json_)


def is_callable(run: Path | None) -> bool:
    """Whether the argument names a function: it has a colon and is no folder."""
    return run is not None and ":" in run.name and not run.exists()


def refuse_options(given: dict[str, Any], when: str) -> None:
    """Refuse options that say nothing about what is audited."""
    from splitveil.errors import ConfigError

    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} can only be given when {when}")


def audit_run(
    run: Path | None,
    profile: str,
    aux: str,
    seed: int,
    replay: Path | None,
    *,
    fresh: bool,
    json_: bool,
) -> None:
    """Attack a run, or measure a record of one again."""
    from splitveil import load_run
    from splitveil.console import progress_bar, show_json

    if replay is not None:
        commands.replay(run, replay, json_=json_)
        return
    loaded = load_run(commands.given_run(run))
    with progress_bar("audit") as bar:
        record = loaded.audit(profile, aux=aux, seed=seed, progress=bar, fresh=fresh)
    page = commands.write_page([loaded.path], loaded.path)
    if json_:
        show_json(record.to_dict())
    else:
        commands.show_audit(loaded.path, record.flags, page)


def audit_callable(
    target: "Target", images: "Material", folder: Path, profile: str, seed: int, *, json_: bool
) -> None:
    """Attack a callable, write record, gallery and page, and show them."""
    import json

    from splitveil.console import progress_bar, show_json, warn
    from splitveil.foreign import examine
    from splitveil.train.files import explain_os_error, write_text

    with progress_bar("audit") as bar:
        record, pictures = examine(target, images, profile, seed=seed, progress=bar)
    with explain_os_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "gallery.json", json.dumps(pictures))
    write_text(folder / "record.json", record.to_json())
    page = commands.write_page([folder], folder)
    if json_:
        show_json(record.to_dict())
    else:
        commands.show_audit(folder, record.flags, page)
    for name, why in record.audit["left_out"].items():
        warn(f"not run: {name}: {why}")
    if not record.audit["repeatable"]:
        warn(
            f"not repeatable: '{target.name}' draws from a stream of its own; let it use the "
            "global streams of torch, numpy or random, or an argument called `generator`"
        )


def find_target(
    name: str, server: str | None, noise: float | None, given: str, *, white_box: bool
) -> "Target":
    """The callables that are named, as what is to be audited."""
    from typing import get_args

    from splitveil.errors import ConfigError, unknown
    from splitveil.foreign import Target
    from splitveil.stranger import Given

    if given not in get_args(Given):
        raise ConfigError(unknown("input", given, get_args(Given)))
    return Target(
        client=find_object(name, "what is audited"),
        name=name,
        server=None if server is None else find_object(server, "--server"),
        server_name=server,
        noise_std=noise,
        white_box=white_box,
        given=given,  # type: ignore[arg-type]  # one of them, as was checked
    )


def folder_for(name: str, out: Path | None) -> Path:
    """Where the results go; refuses a trained run's folder and another callable's."""
    from splitveil.errors import RunError
    from splitveil.report import read_run
    from splitveil.report.fields import text

    function = re.sub(r"[^\w.-]+", "-", name.partition(":")[2])
    folder = Path("runs") / function if out is None else out
    if (folder / "config.toml").exists():
        raise RunError(f"{folder} is a trained run; choose another folder with --out")
    if folder.is_dir() and (folder / "record.json").exists():
        before = text(read_run(folder).record, "config", "callable")
        if before != name:
            raise RunError(
                f"{folder} holds the record of '{before}'; choose another folder with --out"
            )
    return folder


def material(data: str | None, aux_data: str | None, test_data: str | None, aux: str) -> "Material":
    """The images: one dataset divided into its parts, or one for the attacker and one to score."""
    from splitveil.data import aux_view, load, make_splits
    from splitveil.errors import ConfigError
    from splitveil.foreign import Material
    from splitveil.runs import fingerprint

    if data is None and aux_data is not None and test_data is not None:
        return two_sets(load(aux_data), load(test_data), test_data)
    if data is None or aux_data is not None or test_data is not None:
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
    return Material(
        name=data,
        classes=dataset.classes,
        aux=dataset.labelled(view.aux),
        scored=dataset.labelled(view.scored),
        test=dataset.labelled(splits.test),
        knowledge=aux,
        hashes=splits.hashes() | view.hashes() | {"data": fingerprint(dataset)},
    )


def two_sets(known: "Dataset", scored: "Dataset", name: str) -> "Material":
    """Every image of the first for the attacker, every image of the second to score."""
    import torch

    from splitveil.data.splits import hash_all
    from splitveil.errors import DataError
    from splitveil.foreign import Material
    from splitveil.runs import fingerprint

    for what, one, other in (
        ("classes", known.classes, scored.classes),
        ("images of shape", known.image_shape, scored.image_shape),
    ):
        if one != other:
            raise DataError(f"--aux-data has {what} {one}, --test-data {other}; they must agree")
    seen = {image.tobytes() for image in known.images.numpy()}
    if shared := sum(image.tobytes() in seen for image in scored.images.numpy()):
        raise DataError(
            f"{shared} images of --test-data are in --aux-data too; the attacker may not know "
            "the images that are scored"
        )
    aux, test = (d.labelled(torch.arange(len(d))) for d in (known, scored))
    indices = {"aux": torch.arange(len(known)), "scored": torch.arange(len(scored))}
    return Material(
        name=name,
        classes=scored.classes,
        aux=aux,
        scored=test,
        test=test,
        knowledge="aux-data",
        hashes=hash_all(indices | {"test": indices["scored"]})
        | {"data": fingerprint(scored), "aux_data": fingerprint(known)},
    )
