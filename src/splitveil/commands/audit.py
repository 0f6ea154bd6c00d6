"""`splitveil audit`: of a run, of its wire, or of anybody's encoder given as MODULE:FUNCTION."""

import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitveil import commands
from splitveil.commands import material, wire
from splitveil.commands.wire import OTHER_OUT
from splitveil.imports import current_folder_first

if TYPE_CHECKING:
    from splitveil.audits.own_encoder import Material, Target
    from splitveil.types import Record

CHOOSING = (
    "test images were scored, and the run kept others to choose settings by: choose with --aux val "
    "or splitveil sweep, and report a run trained with --final"
)


def audit(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: Annotated[
        Path | None, typer.Argument(help="Folder of the run, or MODULE:FUNCTION.")
    ] = None,
    profile: Annotated[str, typer.Option(help="smoke, quick, standard or paper.")] = "quick",
    aux: Annotated[
        str, typer.Option(help="train, held-out, test90, or val to choose by.")
    ] = "train",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the attacks.")] = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Measure a record again and say what differs.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run every attack, also those finished before.")
    ] = False,
    attacks: Annotated[
        str | None, typer.Option(help="Only these of the profile, as decoder,rmle; it is flagged.")
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="On a GPU: compiled decoders, for many audits.")
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
    members: Annotated[
        str | None, typer.Option(help="All images that MODULE:FUNCTION was trained or chosen on.")
    ] = None,
    attributes: Annotated[
        Path | None, typer.Option(help="Table of attributes, CSV or JSON: see docs/leaks.md.")
    ] = None,
    white_box: Annotated[
        bool, typer.Option("--white-box", help="The attacker has the client's networks.")
    ] = False,
    given: Annotated[
        str, typer.Option("--input", help="What the function takes: auto, numpy or torch.")
    ] = "auto",
    wires: Annotated[
        list[str] | None,
        typer.Option("--wire", help="Attack what left a client: a server's address or a capture."),
    ] = None,
    sent: Annotated[
        str | None, typer.Option(help="With --wire: the images that were sent, in this order.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="With --wire: by the client in eight bits.")
    ] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="With --wire: file with the server's token.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="With --wire: certificates to trust for TLS.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results (default: runs/FUNCTION, RUN/wire).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Attack a run and write `record.json` and `report.html` into its folder.

    An interrupted audit continues with the attack it was at. An earlier record that says what the
    new one does not is kept under another name.

    Example: `splitveil audit runs/first --profile quick`

    Or attack anybody's encoder, a function from images to what leaves the client.

    Example: `splitveil audit mycode:send --data folder:photos --server mycode:answer`

    Or attack what really leaves a deployed client of a run.

    Example: `splitveil audit runs/first --wire http://localhost:8000`
    """
    from splitveil.console import setup_logging
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()
    theirs = {
        "--data": data, "--aux-data": aux_data, "--test-data": test_data, "--server": server,
        "--noise": noise, "--white-box": white_box or None, "--members": members,
        "--input": None if given == "auto" else given,
    }  # fmt: skip
    ours = {"--attacks": attacks, "--compile": compile_ or None}
    tapped = {
        "--sent": sent, "--int8": int8 or None, "--token-file": token_file, "--ca": ca,
    }  # fmt: skip
    if is_callable(run):
        refuse_options(
            {"--replay": replay, "--wire": wires or None} | ours | tapped,
            "a run is audited; leave it out: a function meets every attack of the profile",
        )
        # What the function prints is no result of ours.
        with current_folder_first(), redirect_stdout(sys.stderr):
            target = material.find_target(str(run), server, noise, given, white_box=white_box)
            folder = folder_for(target.name, out)
            images = material.material(
                data, aux_data, test_data, aux, members=members, attributes=attributes
            )
            record = audit_callable(target, images, folder, profile, seed)
        show_callable(record, target.name, folder, json_=json_)
        return
    refuse_options(theirs, "MODULE:FUNCTION is audited, as mycode:send; a run has its own")
    if wires:
        refuse_options(
            {"--replay": replay, "--attributes": attributes} | ours,
            "the run itself is audited; leave it out",
        )
        given_wire = wire.Given(
            sources=tuple(wires), sent=sent, int8=int8, token_file=token_file, ca=ca, out=out
        )
        wire.audit_wire(
            commands.given_run(run), given_wire, profile, aux=aux, seed=seed, fresh=fresh,
            json_=json_,
        )  # fmt: skip
        return
    refuse_options(tapped, "--wire is given")
    refuse_options({"--out": out}, "--wire or MODULE:FUNCTION is given")
    audit_run(
        run, profile, aux, seed, replay, attributes=attributes, fresh=fresh, attacks=attacks,
        compiled=compile_, json_=json_,
    )  # fmt: skip


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
    attributes: Path | None,
    fresh: bool,
    attacks: str | None,
    compiled: bool,
    json_: bool,
) -> None:
    """Attack a run, or measure a record of one again."""
    from splitveil import load_run
    from splitveil.audits import trained_run
    from splitveil.console import out, progress_bar, show_json

    if replay is not None:
        told = {
            "--attributes": attributes, "--attacks": attacks, "--compile": compiled or None,
            "--seed": seed or None, "--fresh": fresh or None,
            "--aux": None if aux == "train" else aux,
            "--profile": None if profile == "quick" else profile,
        }  # fmt: skip
        refuse_options(told, "a run is audited, not a record replayed: that says all of it")
        check_replayable(replay)
        commands.replay(run, replay, json_=json_)
        return
    loaded = load_run(commands.given_run(run))
    named = [] if attacks is None else attacks.split(",")
    only = list(dict.fromkeys(name.strip() for name in named))
    with progress_bar("audit") as bar:
        record = trained_run.audit_run(
            loaded, profile, aux=aux, seed=seed, progress=bar, fresh=fresh, only=only,
            compile=compiled, attributes=attributes,
        )  # fmt: skip
    page = commands.write_page([loaded.path], loaded.path)
    if json_:
        show_json(record.to_dict())
    else:
        commands.show_audit(loaded.path, record.flags, page)
        if aux != "val" and not loaded.config.final:
            out.print(CHOOSING, highlight=False, soft_wrap=True)


def check_replayable(path: Path) -> None:
    """Refuse a record that was made with more than its run and its data."""
    from splitveil.errors import AuditError
    from splitveil.replay import read_record

    told = read_record(path).audit
    for key, option in (("wire", "--wire"), ("attributes", "--attributes")):
        if key in told:
            raise AuditError(
                f"{path} was made with {option} and cannot be replayed from the run alone; audit "
                f"again with the same {option}"
            )


def audit_callable(
    target: "Target", images: "Material", folder: Path, profile: str, seed: int
) -> "Record":
    """Attack a callable, and write record, gallery and page."""
    from splitveil.audits.own_encoder import examine
    from splitveil.console import progress_bar
    from splitveil.keeping import put_record

    with progress_bar("audit") as bar:
        record, pictures = examine(target, images, profile, seed=seed, progress=bar)
    put_record(folder, record, pictures)
    return record


def show_callable(record: "Record", name: str, folder: Path, *, json_: bool) -> None:
    """Write the page of a callable's record, and show what was found and what was not measured."""
    from splitveil.console import show_json, warn

    page = commands.write_page([folder], folder)
    if json_:
        show_json(record.to_dict())
    else:
        commands.show_audit(folder, record.flags, page)
    for attack, why in record.audit["left_out"].items():
        warn(f"not run: {attack}: {why}")
    for leak, why in record.leaks.get("refused", {}).items():
        warn(f"not measured: {leak}: {why}")
    if not record.audit["repeatable"]:
        warn(
            f"not repeatable: '{name}' draws from a stream of its own; let it use the "
            "global streams of torch, numpy or random, or an argument called `generator`"
        )


def folder_for(name: str, out: Path | None) -> Path:
    """Where the results go; refuses what cannot be written, a run's folder, another callable's."""
    from splitveil.errors import RunError
    from splitveil.report import read_run
    from splitveil.report.fields import text
    from splitveil.train.files import check_folder

    function = re.sub(r"[^\w.-]+", "-", name.partition(":")[2])
    folder = Path("runs") / function if out is None else out
    check_folder(folder, OTHER_OUT)
    if (folder / "config.toml").exists():
        raise RunError(f"{folder} is a trained run; choose another folder with --out")
    if folder.is_dir() and (folder / "record.json").exists():
        before = text(read_run(folder).record, "config", "callable")
        if before != name:
            raise RunError(
                f"{folder} holds the record of '{before}'; choose another folder with --out"
            )
    return folder
