"""The app: its commands, and how errors and signals become messages and exit codes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from splitveil import __version__
from splitveil.cli import audits, deploy, experiments, lists, reports
from splitveil.cli.console import announce, show_error
from splitveil.cli.train import train
from splitveil.errors import ConfigError, SplitVeilError

EXIT_USER_ERROR, EXIT_SIGNAL = 2, 128  # to which the number of the signal is added
TOO_LARGE = ("can't allocate memory", "out of memory", "verflow")  # torch's words
CONTINUED = {  # what to do after an interruption, where the same command does not go on
    "train": "add --resume", "sweep": "add --resume, and --name if it has one",
    "audit-encoder": "repeat the command; it begins anew",
    "replay": "repeat the command; it begins anew",
    "serve": "repeat the command; it begins anew",
}  # fmt: skip
AGAIN = "repeat the command"  # which reads what is finished and goes on
LONG = {
    "demo", "advise", "train", "audit", "audit-encoder", "audit-wire", "clients", "sweep",
    "reproduce", "replay",
}  # fmt: skip
MANY = 8  # options of a command, from which they stand below headings
PANELS = {  # headings of the options of long commands, the same in each
    "What to train": (
        "dataset", "defence", "net", "client", "server", "epochs", "recipe", "config", "set",
        "final", "vary", "trials", "sampler", "only",
    ),
    "What the device has": ("macs", "wire", "params", "track", "exposure", "image", "family"),
    "What to show": ("rank", "backbone", "smaller", "limit"),
    "What is attacked": (
        "data", "aux-data", "test-data", "asks", "own", "noise", "members", "input", "sent",
        "export", "int8",
    ),
    "The attacks": (
        "profile", "aux", "attacks", "fresh", "alone", "attributes", "white-box", "audit",
    ),
    "Where it runs": (
        "device", "precision", "threads", "compile", "engine", "address", "jobs", "minutes",
    ),
    "Seeds": ("seed", "seeds"),
    "Files and folders": (
        "data-dir", "runs-dir", "name", "out", "overwrite", "resume", "capture", "draws",
        "no-draws", "log-file", "access-log",
    ),
    "Network": (
        "host", "port", "token-file", "ca", "tls-cert", "tls-key", "verify", "allow-no-noise",
    ),
    "What is asked": ("always-ask", "never-ask", "budget"),
    "Limits": (
        "max-batch", "max-delay-ms", "max-waiting", "max-in-flight", "max-connections",
        "max-per-address", "max-header-bytes", "header-seconds", "body-seconds", "answer-seconds",
        "send-seconds", "idle-seconds",
    ),
    "Output": ("json", "lang"),
}  # fmt: skip
PANEL_OF = {f"--{option}": panel for panel, options in PANELS.items() for option in options}


def explained(error: Exception) -> str | None:
    """The message for an error that users, paths or sizes can cause; None for a bug of the program.

    >>> explained(FileNotFoundError(2, "No such file or directory", "x"))
    'cannot use x: No such file or directory; check the path and its permissions'
    """
    if isinstance(error, SplitVeilError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, MemoryError) or any(words in str(error) for words in TOO_LARGE):
        first = next(iter(str(error).splitlines()), "MemoryError")
        return (
            f"not enough memory ({first}); choose smaller sizes: of the batch, the images, the "
            "classes, hidden_dim or bank"
        )
    return None


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that it removes what it wrote half."""
    if threading.current_thread() is not threading.main_thread():  # Python catches no signals there
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Group(TyperGroup):
    """Turns errors that a user can correct into a message and exit code 2.

    Ctrl-C becomes 130, SIGTERM 143.
    """

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer keeps a click of its own
        try:
            with ended_by_sigterm():
                return super().invoke(ctx)
        except (SplitVeilError, OSError, MemoryError, RuntimeError, TypeError) as error:
            message = explained(error)
            if message is None:
                raise
            show_error(message)
            command = ctx.invoked_subcommand
            if command in LONG and not isinstance(error, SplitVeilError):
                announce(f"To continue once that is mended, {CONTINUED.get(command, AGAIN)}.")
            ctx.exit(EXIT_USER_ERROR)
        except KeyboardInterrupt as stop:
            again = CONTINUED.get(ctx.invoked_subcommand, AGAIN)
            show_error(f"interrupted; what was complete is saved. To continue, {again}")
            number = stop.args[0] if stop.args else signal.SIGINT
            ctx.exit(EXIT_SIGNAL + number)


class _Command(TyperCommand):
    """Groups many options below headings; answers `--lambd 0.3` with the option that sets it."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as above
        super().__init__(*args, **named)
        options = [part for part in self.params if isinstance(part, TyperOption)]
        shown = [option for option in options if not option.hidden]
        for option in shown if len(shown) > MANY else ():
            option.rich_help_panel = option.rich_help_panel or PANEL_OF.get(option.opts[0])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as above
        known = {option for part in self.get_params(ctx) for option in part.opts}  # and --help
        for word in args if "--set" in known else ():
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                refuse_setting(self.name, option)
        return super().parse_args(ctx, args)


def refuse_setting(command: str | None, option: str) -> None:
    """Raise a ConfigError if an unknown option is the name of a setting."""
    from splitveil.config.run_config import ALIASES, RUN_KEYS
    from splitveil.defences.catalogue import DEFENCES

    name = option.lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    if name in RUN_KEYS or any(name in one.setting_types() for one in DEFENCES.values()):
        raise ConfigError(
            f"splitveil {command} has no option {option}; write --set {name}=… for this setting"
        )


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    epilog="Begin with `splitveil demo`. With data of your own: `splitveil train --dataset "
    "folder:photos --name first`, then `splitveil audit runs/first`. Every command explains itself "
    "with `--help`.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train split networks, in which a client sends features instead of images and a server "
    "answers; attack what the client sends, and report what it reveals.",
)


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"splitveil {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def bench() -> None:
    """Say where the benchmark of 0.1.0 is now."""
    raise ConfigError(
        "`splitveil bench` is no longer part of the package; run "
        "`python benchmarks/surrogate_speed.py OUT.json` in a clone of the repository"
    )


COMMANDS = {
    "Train and attack": (experiments.demo, experiments.advise, train, audits.audit, audits.replay),
    "Attack other clients": (audits.audit_encoder, audits.audit_wire),
    "Read the results": (reports.report, reports.compare, reports.explain, reports.doctor),
    "Make many runs": (experiments.clients, experiments.sweep, experiments.reproduce),
    "Deploy": (deploy.export, deploy.serve, deploy.infer),
    "List names": (lists.datasets, lists.defences, lists.attacks, lists.nets, lists.recipes),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        # `audit` itself says what to use in place of options that it no longer has.
        former = {"ignore_unknown_options": command is audits.audit}
        app.command(cls=_Command, context_settings=former, rich_help_panel=panel)(command)
app.command(hidden=True)(bench)


def main() -> None:
    """Entry point of the console script."""
    app()
