"""Audits on the command line: of a run, of anybody's encoder, of captured requests; and replay."""

import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from splitveil.cli import console
from splitveil.cli.console import JsonFlag, OptPath, OptPaths, OptText, OutFolder, RunFolder
from splitveil.cli.deploy import Certificates, TokenFile, read_token, retry_notice, with_extra
from splitveil.errors import ConfigError, RunError
from splitveil.io import check_folder, write_text

ATTACKED = "What is attacked"  # a heading of options
OTHER_OUT = "choose another folder with --out"
if TYPE_CHECKING:
    from splitveil.report.words import Lang

SCHEMES = ("http://", "https://")
OLD_FORMS = {
    "--replay": "splitveil replay RECORD [--run RUN]",
    "--wire": "splitveil audit-wire RUN ADDRESS, or audit-wire RUN CAPTURE",
}

Aux = Annotated[str, Option(help="Images the attacker knows: train, held-out, test90 or val.")]
AttackSeed = Annotated[int, Option(min=0, help="Random seed of the attacks.")]
Fresh = Annotated[bool, Option("--fresh", help="Run finished attacks again.")]
AttributesOption = Annotated[
    OptPath, Option(help="CSV table of attributes, see docs/reference/leaks.md.")
]


def audit(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: Annotated[OptPath, Argument(help="Folder of a trained run, such as runs/first.")] = None,
    profile: console.Profile = "quick",
    aux: Aux = "train",
    seed: AttackSeed = 0,
    fresh: Fresh = False,
    attacks: Annotated[
        OptText, Option(help="Only these attacks, such as decoder,rmle; raises a flag.")
    ] = None,
    compile_: Annotated[bool, Option("--compile", help="Compile the decoders; GPU only.")] = False,
    alone: Annotated[
        OptPaths,
        Option(help="Audited run of --defence alone to compare with; may be given several times."),
    ] = None,
    attributes: AttributesOption = None,
    lang: console.Language = "en",
    precision: console.Precision = None,
    threads: console.Threads = None,
    json_: JsonFlag = False,
    rest: Annotated[console.OptTexts, Argument(hidden=True)] = None,
) -> None:
    """Attack a trained run, and write what the attacker got into its folder.

    `record.json` holds the numbers, `report.html` shows them. The attacker knows the images of
    `--aux`; with `val` the validation images are reconstructed, in order to choose settings by
    them. The same command again continues an interrupted audit. An earlier record is kept under
    another name if it has something that the new one lacks. `--compile` starts slowly; it pays off
    over many audits. `--alone` says what the server adds to a client that answers alone; with it, a
    record of these attacks that is there already is not made again.

    Example: `splitveil audit runs/first --profile quick`

    Example: `splitveil audit runs/first --alone runs/alone`
    """
    from splitveil.provenance import model_hash
    from splitveil.report import gains
    from splitveil.report.words import language, word
    from splitveil.runs import load_run

    console.start()
    chosen = language(lang)
    loaded = load_run(_checked_run(run, rest or []))
    rivals = gains.read_alone(alone or [])
    gains.check_data(loaded.config.dataset, rivals)  # before hours of attacks
    only = console.names_of(attacks) or []
    record = loaded.record if rivals and not (fresh or only or attributes) else None
    if record is None or not gains.is_of(record, model_hash(loaded.model), profile, aux, seed):
        with console.progress_bar("audit") as bar:
            record = loaded.audit(
                profile, aux=aux, seed=seed, progress=bar, fresh=fresh,
                only=only, compile=compile_, attributes=attributes,
                precision=precision or "auto", threads=threads,
            )  # fmt: skip
    if rivals:
        gains.check_rivals(record, rivals)
        record = gains.beside(record, rivals)
        write_text(loaded.path / "record.json", record.to_json())
    show_audit(loaded.path, record, json_=json_, lang=chosen)
    if not json_ and aux != "val" and not loaded.config.final:
        console.print_lines(word("audit.choosing", chosen))


def audit_encoder(  # noqa: PLR0917 - every option of the command, as typer wants them
    name: Annotated[str, Argument(metavar="MODULE:FUNCTION", help="Such as mycode:send.")],
    data: Annotated[
        OptText, Option("--data", "--dataset", help="Images: folder:PATH, npz:PATH or a dataset.")
    ] = None,
    aux_data: Annotated[
        OptText, Option(help="Instead of --data: images the attacker knows.")
    ] = None,
    test_data: Annotated[OptText, Option(help="With --aux-data: images to reconstruct.")] = None,
    server: Annotated[
        OptText, Option(help="The server's half as MODULE:FUNCTION.", rich_help_panel=ATTACKED)
    ] = None,
    asks: Annotated[
        OptText, Option(help="MODULE:FUNCTION that says which images are sent (default: all).")
    ] = None,
    own_answers: Annotated[
        OptText, Option("--own", help="With --asks: MODULE:FUNCTION that answers on the device.")
    ] = None,
    noise: Annotated[float | None, Option(help="Standard deviation of the noise it adds.")] = None,
    members: Annotated[
        OptText, Option(help="Images that the client was trained or tuned on.")
    ] = None,
    attributes: AttributesOption = None,
    white_box: Annotated[bool, Option("--white-box", help="The attacker has its code.")] = False,
    given: Annotated[
        str, Option("--input", help="What the function takes: auto, numpy or torch.")
    ] = "auto",
    profile: console.Profile = "quick",
    aux: Annotated[str, Option(help="Images the attacker knows: train or test90.")] = "train",
    seed: AttackSeed = 0,
    out: OutFolder = None,
    json_: JsonFlag = False,
) -> None:
    """Attack an encoder of your own: a Python function from images to what the client sends.

    Images are either `--data`, which is split, or `--aux-data` and `--test-data`. `--noise` is the
    standard deviation of Gaussian noise that the function adds last. `--asks` is for a client that
    answers what it is sure of: True for each image that is sent. The results go to the folder
    `runs/FUNCTION`, or to that of `--out`.

    Example: `splitveil audit-encoder mycode:send --data folder:photos --server mycode:answer`
    """
    from splitveil.audits import own_encoder
    from splitveil.config.resolve import current_folder_first

    console.start()
    # What the function prints must not mix with the JSON on stdout.
    with current_folder_first(), redirect_stdout(sys.stderr), console.progress_bar("audit") as bar:
        own = own_encoder.find_encoder(
            name, server, noise, given, white_box=white_box, asks=asks, device=own_answers
        )
        folder = _encoder_folder(name, out)
        images = own_encoder.read_images(
            data, aux_data, test_data, aux, members=members, attributes=attributes
        )
        record, pictures = own_encoder.audit_encoder(own, images, profile, seed=seed, progress=bar)
    show_audit(folder, record, pictures, json_=json_)
    for attack, why in record.audit.left_out.items():
        console.warn(f"not run: {attack}: {why}")
    if asks is not None and record.accuracy is None:
        console.warn("not measured: accuracy: it needs --server and --own, what the device answers")
    for leak, why in record.leaks.get("refused", {}).items():
        console.warn(f"not measured: {leak}: {why}")
    if not record.audit.repeatable:
        console.warn(
            f"not repeatable: '{name}' has its own random numbers, which a seed does not reach; "
            "use the global ones of torch, numpy or random, or an argument called `generator`"
        )


def audit_wire(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: RunFolder,
    sources: Annotated[list[str], Argument(help="The server's address, or one or two files.")],
    profile: console.Profile = "quick",
    aux: Aux = "train",
    seed: AttackSeed = 0,
    fresh: Fresh = False,
    sent: Annotated[OptText, Option(help="The images that were sent, in that order.")] = None,
    int8: Annotated[
        bool, Option("--int8", help="The client in 8-bit integers is the one that sends.")
    ] = False,
    token_file: TokenFile = None,
    ca: Certificates = None,
    out: OutFolder = None,
    json_: JsonFlag = False,
) -> None:
    """Attack what a deployed client of a run really sends.

    Given an address, the client sends the run's own images there and keeps what it sends. Given
    files of `splitveil infer --capture`, these are attacked; a second file of the same images tells
    whether the noise is drawn anew. The results go to the folder `RUN/wire`, or that of `--out`.

    Example: `splitveil audit-wire runs/first http://localhost:8000`

    Example: `splitveil audit-wire runs/first sent.jsonl --sent folder:photos`
    """
    from splitveil.audits import captured_requests
    from splitveil.audits.trained_run import COPY, run_store
    from splitveil.data.catalogue import load
    from splitveil.runs import find_export, load_run

    console.start()
    live = any(source.startswith(SCHEMES) for source in sources)
    if live and len(sources) > 1:
        raise ConfigError(f"give one address, or one or two captures, got {', '.join(sources)}")
    if not live and (token_file is not None or ca is not None):
        raise ConfigError("--token-file and --ca are for a server's address; leave them out")
    if live or int8:
        with_extra("onnxruntime")
    loaded = load_run(run)
    check_folder(run, COPY)  # which keeps finished attacks
    folder = _results_folder(run / "wire" if out is None else out)

    def send(images: Any) -> list[Path]:  # noqa: ANN401 - a Tensor, but torch is imported late
        return captured_requests.send_and_capture(
            find_export(run), sources[0], images, folder, token=read_token(token_file),
            ca_file=ca, int8=int8, allow_no_noise=loaded.noise_std == 0,
            waiting=retry_notice(sources[0]),
        )  # fmt: skip

    captures = send if live else [Path(source) for source in sources]
    images = None if sent is None else load(sent, loaded.config.data_dir, whole=True)
    small = captured_requests.int8_client(find_export(run)) if int8 else (None, None)
    with console.progress_bar("audit") as bar:
        record, pictures = captured_requests.audit_wire(
            loaded, captures, profile, aux=aux, images=images, seed=seed, clean=small[0],
            decides=small[1], earlier=loaded.record, store=run_store(loaded, fresh=fresh),
            progress=bar,
        )  # fmt: skip
    show_audit(folder, record, pictures, json_=json_)
    if not json_:
        console.print_lines(*wire_lines(record.audit.wire))


def replay(
    record: Annotated[Path, Argument(help="A record.json.")],
    run: Annotated[
        OptPath, Option(help="Folder of the run (default: where the record lies).")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Repeat the audit of a record, and list the numbers that differ.

    The exit code is 1 if there are any.

    Example: `splitveil replay runs/first/record.json`
    """
    from splitveil.audits import trained_run
    from splitveil.record.schema import read_record
    from splitveil.runs import load_run

    console.start()
    known = read_record(record)
    trained_run.check_replayable(known)  # first, for such a record may have no run
    with console.progress_bar("replay") as bar:
        found = trained_run.replay(load_run(record.parent if run is None else run), known, bar)
    end = f"{len(found)} differences" if found else "every number is the same, bit for bit"
    console.show_result({"record": str(record), "differences": found}, *found, end, json_=json_)
    if found:
        raise Exit(1)


def _checked_run(run: Path | None, rest: list[str]) -> Path:
    """The folder of the run; refuses forms that `audit` had in 0.1.0, and says what to use."""
    words = [word.partition("=")[0] for word in (str(run), *rest)]
    for option, instead in OLD_FORMS.items():
        if option in words:
            raise ConfigError(f"audit {option} is now a command of its own: {instead}")
    if run is None:
        raise ConfigError("which run? give its folder, for example: splitveil audit runs/first")
    if ":" in run.name and not run.exists():
        raise ConfigError(
            f"audit takes the folder of a run; for a function use: splitveil audit-encoder {run} "
            "--data IMAGES"
        )
    if rest or str(run).startswith("-"):
        wrong = next((word for word in words if word.startswith("-")), words[-1])
        raise ConfigError(f"audit has no option or argument '{wrong}'; see splitveil audit --help")
    return run


def show_audit(
    folder: Path,
    record: Any,  # noqa: ANN401 - a Record, but the module is imported late
    pictures: Any = None,  # noqa: ANN401
    *,
    json_: bool,
    lang: "Lang" = "en",
) -> None:
    """Write a record, if its pictures are given, and its page; print them, and every flag."""
    from splitveil.attacks.profiles import PROFILES
    from splitveil.record.files import read_run, write_record
    from splitveil.report.columns import ATTACKS, attack_rows, flags_of, overview, written_flag
    from splitveil.report.page import write_page
    from splitveil.report.words import sentence, word

    if pictures is not None:
        write_record(folder, record, pictures, list(PROFILES))
    page = write_page([folder], folder, lang)
    if json_:
        console.show_json(record.to_dict())
        return
    run = read_run(folder)
    title = sentence("audit.attacks", folder=str(folder)).plain(lang)
    console.show_table(title, *ATTACKS.brief(attack_rows([run]), lang))
    console.show_table(word("audit.runs", lang), *overview([run], lang))
    for flag in flags_of(run) or ():
        name, seen, advice = written_flag(flag, lang)
        console.warn(sentence("audit.flag", name=name, seen=seen, advice=advice).plain(lang))
    console.print_lines(sentence("audit.page", page=str(page)).plain(lang))


def _results_folder(folder: Path) -> Path:
    """The folder, if it can be written and is not a run's, whose own record would be replaced."""
    check_folder(folder, OTHER_OUT.capitalize())
    if (folder / "config.toml").exists():
        raise RunError(f"{folder} is a trained run; {OTHER_OUT}")
    return folder


def _encoder_folder(name: str, out: Path | None) -> Path:
    """Where the results of a function go; never the folder of another function."""
    from splitveil.record.files import read_run

    function = re.sub(r"[^\w.-]+", "-", name.partition(":")[2])
    folder = _results_folder(Path("runs") / function if out is None else out)
    if folder.is_dir() and (folder / "record.json").exists():
        before = read_run(folder).record.config.get("callable")
        if before != name:
            raise RunError(f"{folder} holds the record of '{before}'; {OTHER_OUT}")
    return folder


def wire_lines(wire: Mapping[str, Any]) -> list[str]:
    """The checks of captured requests as lines of text."""
    lines = [
        f"{data['capture']}: {data['rows']} rows in {data['calls']} calls, {data['bytes']} bytes"
        for data in wire["captures"]
    ]
    if rule := wire.get("rule"):
        lines.append(
            f"exit rule: {rule['sent']} of {rule['images']} images were sent, the rule sends "
            f"{rule['allowed']}"
        )
    if "accuracy" in wire:
        lines.append(
            f"accuracy on what was captured: {100 * wire['accuracy']:.2f} %; the table's acc% is "
            "on the run's own test images"
        )
    if noise := wire.get("noise"):
        lines.append(
            f"noise: declared {noise['declared']:.4g}, measured {noise['measured']:.4g} "
            f"(expected {noise['measured_low']:.4g} to {noise['measured_high']:.4g})"
        )
    failed = ", ".join(wire["failed"]) or "none"
    lines.append(f"tests of the noise: {len(wire['tests'])}, failed: {failed}")
    if "slope" in wire["failed"]:
        lines.append("these tests also fail if rows and images differ in order: check that first")
    if "difference" in (offline := wire["offline"]):
        lines.append(
            f"{offline['attack']}: MSE {offline['mse']:.4f} in the run's audit, on the wire "
            f"{offline['difference']:+.5f} ({offline['difference_low']:+.5f} to "
            f"{offline['difference_high']:+.5f})"
        )
    return lines
