"""Audits on the command line: of a run, of anybody's encoder, of captured requests; and replay."""

import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from splitveil.cli import console
from splitveil.cli.console import JsonFlag, OutFolder, RunFolder
from splitveil.cli.deploy import Certificates, TokenFile, read_token, retry_notice, with_extra
from splitveil.errors import ConfigError, RunError
from splitveil.io import check_folder

CHOOSING = (
    "test images were scored, and the run kept others to choose settings by: choose with --aux val "
    "or splitveil sweep, and report a run trained with --final"
)

OTHER_OUT = "Choose another folder with --out"
SCHEMES = ("http://", "https://")

OLD_FORMS = {
    "--replay": "splitveil replay RECORD [--run RUN]",
    "--wire": "splitveil audit-wire RUN ADDRESS, or audit-wire RUN CAPTURE",
}

Profile = Annotated[str, Option(help="smoke, quick, standard or paper.")]
Aux = Annotated[str, Option(help="train, held-out, test90, or val to choose by.")]
Seed = Annotated[int, Option(min=0, help="Seed of the attacks.")]

Fresh = Annotated[bool, Option("--fresh", help="Run every attack, also those finished before.")]

Table = Annotated[Path | None, Option(help="CSV table of attributes: see docs/reference/leaks.md.")]


def audit(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: Annotated[Path | None, Argument(help="Folder of the run.")] = None,
    profile: Profile = "quick",
    aux: Aux = "train",
    seed: Seed = 0,
    fresh: Fresh = False,
    attacks: Annotated[
        str | None, Option(help="Only these, as decoder,rmle; it is flagged.")
    ] = None,
    compile_: Annotated[bool, Option("--compile", help="Compiled decoders, on a GPU.")] = False,
    attributes: Table = None,
    json_: JsonFlag = False,
    rest: Annotated[list[str] | None, Argument(hidden=True)] = None,
) -> None:
    """Attack a run and write `record.json` and `report.html` into its folder.

    An interrupted audit continues with the attack it was at. An earlier record that says what the
    new one does not is kept under another name. `--compile` pays off over many audits.

    Example: `splitveil audit runs/first --profile quick`
    """
    from splitveil.runs import load_run

    console.start()
    loaded = load_run(_checked_run(run, rest or []))
    only = [] if attacks is None else [name.strip() for name in attacks.split(",")]
    with console.progress_bar("audit") as bar:
        record = loaded.audit(
            profile, aux=aux, seed=seed, progress=bar, fresh=fresh, only=list(dict.fromkeys(only)),
            compile=compile_, attributes=attributes,
        )  # fmt: skip
    _show(loaded.path, record, json_=json_)
    if not json_ and aux != "val" and not loaded.config.final:
        console.out.print(CHOOSING, highlight=False, soft_wrap=True)


def audit_encoder(  # noqa: PLR0917 - every option of the command, as typer wants them
    name: Annotated[str, Argument(metavar="MODULE:FUNCTION", help="As mycode:send.")],
    data: Annotated[str | None, Option(help="folder:PATH, npz:PATH or a dataset's name.")] = None,
    aux_data: Annotated[str | None, Option(help="All the attacker's images.")] = None,
    test_data: Annotated[str | None, Option(help="All the images to score.")] = None,
    server: Annotated[str | None, Option(help="MODULE:FUNCTION of the server.")] = None,
    noise: Annotated[
        float | None, Option(help="Deviation of the Gaussian noise the client adds last.")
    ] = None,
    members: Annotated[
        str | None, Option(help="All images that the client was trained or chosen on.")
    ] = None,
    attributes: Table = None,
    white_box: Annotated[
        bool, Option("--white-box", help="The attacker has its networks.")
    ] = False,
    given: Annotated[str, Option("--input", help="What it takes: auto, numpy or torch.")] = "auto",
    profile: Profile = "quick",
    aux: Annotated[str, Option(help="train or test90.")] = "train",
    seed: Seed = 0,
    out: OutFolder = None,
    json_: JsonFlag = False,
) -> None:
    """Attack anybody's encoder, a function from images to what leaves the client.

    `--aux-data` and `--test-data` stand in place of `--data`. The results go to `runs/FUNCTION`
    without `--out`.

    Example: `splitveil audit-encoder mycode:send --data folder:photos --server mycode:answer`
    """
    from splitveil.attacks.profiles import PROFILES
    from splitveil.audits import own_encoder
    from splitveil.config.resolve import current_folder_first
    from splitveil.record.files import write_record

    console.start()
    # What the function prints is no result of ours.
    with current_folder_first(), redirect_stdout(sys.stderr), console.progress_bar("audit") as bar:
        own = own_encoder.find_encoder(name, server, noise, given, white_box=white_box)
        folder = _encoder_folder(name, out)
        images = own_encoder.read_images(
            data, aux_data, test_data, aux, members=members, attributes=attributes
        )
        record, pictures = own_encoder.audit_encoder(own, images, profile, seed=seed, progress=bar)
        write_record(folder, record, pictures, list(PROFILES))
    _show(folder, record, json_=json_)
    for attack, why in record.audit.left_out.items():
        console.warn(f"not run: {attack}: {why}")
    for leak, why in record.leaks.get("refused", {}).items():
        console.warn(f"not measured: {leak}: {why}")
    if not record.audit.repeatable:
        console.warn(
            f"not repeatable: '{name}' draws from a stream of its own; let it use the "
            "global streams of torch, numpy or random, or an argument called `generator`"
        )


def audit_wire(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: RunFolder,
    sources: Annotated[
        list[str], Argument(help="A server's address to send to, or one or two captures.")
    ],
    profile: Profile = "quick",
    aux: Aux = "train",
    seed: Seed = 0,
    fresh: Fresh = False,
    sent: Annotated[str | None, Option(help="The images that were sent, in this order.")] = None,
    int8: Annotated[bool, Option("--int8", help="By the client in eight bits.")] = False,
    token_file: TokenFile = None,
    ca: Certificates = None,
    out: OutFolder = None,
    json_: JsonFlag = False,
) -> None:
    """Attack what really leaves a deployed client of a run.

    The results go to `RUN/wire` without `--out`.

    Example: `splitveil audit-wire runs/first http://localhost:8000`

    Example: `splitveil audit-wire runs/first sent.jsonl --sent folder:photos`
    """
    from splitveil.attacks.profiles import PROFILES
    from splitveil.audits import captured_requests
    from splitveil.audits.trained_run import COPY, run_store
    from splitveil.data.catalogue import load
    from splitveil.record.files import write_record
    from splitveil.runs import find_export, load_run

    console.start()
    live = any(source.startswith(SCHEMES) for source in sources)
    if live and len(sources) > 1:
        raise ConfigError(f"give one address, or one or two captures, got {', '.join(sources)}")
    if not live and (token_file is not None or ca is not None):
        raise ConfigError("--token-file and --ca can only be given with a server's address")
    if live or int8:
        with_extra("onnxruntime")
    loaded = load_run(run)
    check_folder(run, COPY)  # finished attacks are kept there
    folder = _results_folder(run / "wire" if out is None else out)

    def send(images: Any) -> list[Path]:  # noqa: ANN401 - Tensor, which is imported late
        return captured_requests.send_and_capture(
            find_export(run), sources[0], images, folder, token=read_token(token_file),
            ca_file=ca, int8=int8, waiting=retry_notice(sources[0]),
        )  # fmt: skip

    with console.progress_bar("audit") as bar:
        record, pictures = captured_requests.audit_wire(
            loaded,
            send if live else [Path(source) for source in sources],
            profile,
            aux=aux,
            images=None if sent is None else load(sent, loaded.config.data_dir, whole=True),
            seed=seed,
            clean=captured_requests.int8_encoder(find_export(run)) if int8 else None,
            earlier=loaded.record,
            store=run_store(loaded, fresh=fresh),
            progress=bar,
        )
    write_record(folder, record, pictures, list(PROFILES))
    _show(folder, record, json_=json_)
    if not json_:
        console.print_lines(*wire_lines(record.audit.wire))


def replay(
    record: Annotated[Path, Argument(help="A record.json.")],
    run: Annotated[
        Path | None, Option(help="Folder of the run (default: that of the record).")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Measure a record again and say what differs; exit code 1 when a number does.

    Example: `splitveil replay runs/first/record.json`
    """
    from splitveil.audits import trained_run
    from splitveil.record.schema import read_record
    from splitveil.runs import load_run

    console.start()
    known = read_record(record)
    trained_run.check_replayable(known)  # before a run is looked for
    with console.progress_bar("replay") as bar:
        found = trained_run.replay(load_run(record.parent if run is None else run), known, bar)
    end = f"{len(found)} differences" if found else "every number is the same, bit for bit"
    console.show_result({"record": str(record), "differences": found}, *found, end, json_=json_)
    if found:
        raise Exit(1)


def _checked_run(run: Path | None, rest: list[str]) -> Path:
    """The folder of the run; says what to use in place of the forms that `audit` once had."""
    words = [word.partition("=")[0] for word in (str(run), *rest)]
    for option, instead in OLD_FORMS.items():
        if option in words:
            raise ConfigError(f"audit {option} is a command of its own: {instead}")
    if run is None:
        raise ConfigError("which run? give its folder, for example: splitveil audit runs/first")
    if ":" in run.name and not run.exists():
        raise ConfigError(
            f"audit takes a run; for a function: splitveil audit-encoder {run} --data IMAGES"
        )
    if rest or str(run).startswith("-"):
        wrong = next((word for word in words if word.startswith("-")), words[-1])
        raise ConfigError(f"audit has no option or argument '{wrong}'; see splitveil audit --help")
    return run


def _show(folder: Path, record: Any, *, json_: bool) -> None:  # noqa: ANN401 - Record, imported late
    """Write the page of a record; print what the attacks got, the summary, and every flag."""
    from splitveil.record.files import read_run
    from splitveil.report.columns import ATTACKS, attack_rows
    from splitveil.report.page import write_page

    page = write_page([folder], folder)
    if json_:
        console.show_json(record.to_dict())
        return
    run = read_run(folder)
    console.show_table(f"Attacks on {folder}", *ATTACKS.brief(attack_rows([run])))
    console.show_runs([run])
    for flag in run.record.flags or ():
        console.warn(f"flag: {flag.name}: {flag.seen}; {flag.advice}")
    console.print_lines(f"page: {page}")


def _results_folder(folder: Path) -> Path:
    """The folder, if it can be written; never a run's, whose own record would be replaced."""
    check_folder(folder, OTHER_OUT)
    if (folder / "config.toml").exists():
        raise RunError(f"{folder} is a trained run; choose another folder with --out")
    return folder


def _encoder_folder(name: str, out: Path | None) -> Path:
    """Where the results of a callable go; refuses the folder of another one."""
    from splitveil.record.files import read_run

    function = re.sub(r"[^\w.-]+", "-", name.partition(":")[2])
    folder = _results_folder(Path("runs") / function if out is None else out)
    if folder.is_dir() and (folder / "record.json").exists():
        before = read_run(folder).record.config.get("callable")
        if before != name:
            raise RunError(
                f"{folder} holds the record of '{before}'; choose another folder with --out"
            )
    return folder


def wire_lines(wire: Mapping[str, Any]) -> list[str]:
    """What captured requests say, in lines."""
    lines = [
        f"{data['capture']}: {data['rows']} rows in {data['calls']} calls, {data['bytes']} bytes"
        for data in wire["captures"]
    ]
    if "accuracy" in wire:
        lines.append(
            f"accuracy on what was captured: {100 * wire['accuracy']:.2f} %; acc% above is that "
            "on the run's own images, sent here"
        )
    if noise := wire.get("noise"):
        lines.append(
            f"noise: declared {noise['declared']:.4g}, measured {noise['measured']:.4g} (sound: "
            f"{noise['measured_low']:.4g} to {noise['measured_high']:.4g})"
        )
    failed = ", ".join(wire["failed"]) or "none"
    lines.append(f"tests of the noise: {len(wire['tests'])}, failed: {failed}")
    if "slope" in wire["failed"]:
        lines.append("rows in another order than the images fail these tests too: look there first")
    if "difference" in (offline := wire["offline"]):
        lines.append(
            f"{offline['attack']}: MSE {offline['mse']:.4f} in the run's audit, on the wire "
            f"{offline['difference']:+.5f} ({offline['difference_low']:+.5f} to "
            f"{offline['difference_high']:+.5f})"
        )
    return lines
