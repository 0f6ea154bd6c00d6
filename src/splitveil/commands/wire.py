"""`splitveil audit RUN --wire`: attacks on what really leaves a deployed client."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitveil import commands
from splitveil.commands.serve import find_export, read_token, retry_notice, with_extra

if TYPE_CHECKING:
    from splitveil.audits.trained_run import Opened

FOLDER = "wire"  # below a run
SCHEMES = ("http://", "https://")
OTHER_OUT = "Choose another folder with --out"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is listened to: a server's address, or captures; and the images that were sent."""

    sources: tuple[str, ...]
    sent: str | None = None
    int8: bool = False
    token_file: Path | None = None
    ca: Path | None = None
    out: Path | None = None

    @property
    def live(self) -> bool:
        """Whether the client is run here, against a server."""
        return any(source.startswith(SCHEMES) for source in self.sources)


def audit_wire(
    run: Path, given: Given, profile: str, *, aux: str, seed: int, fresh: bool, json_: bool
) -> None:
    """Attack what was sent, and write record, gallery and page beside the run's own."""
    from dataclasses import replace

    from splitveil import load_run
    from splitveil.audits.captured_requests import audit_wire as attack
    from splitveil.audits.captured_requests import int8_encoder, open_wire
    from splitveil.audits.trained_run import COPY, folder_store
    from splitveil.console import progress_bar, show_json
    from splitveil.data import load
    from splitveil.keeping import put_record
    from splitveil.train.files import check_folder

    check_given(given)
    loaded = load_run(run)
    check_folder(run, COPY)  # finished attacks are kept there
    folder = results_folder(run, given.out)
    store = folder_store(loaded.path / "audit")
    images = None
    if given.sent is not None:
        images = load(given.sent, loaded.config.data_dir, whole=True)
    with progress_bar("audit") as bar:
        opened = open_wire(loaded, aux=aux, images=images, progress=bar)
        captures = send(opened, given, folder) if given.live else [Path(s) for s in given.sources]
        record, pictures = attack(
            opened,
            captures,
            profile,
            seed=seed,
            clean=int8_encoder(find_export(run)) if given.int8 else None,
            progress=bar,
            store=replace(store, read=lambda _: None) if fresh else store,
        )
    put_record(folder, record, pictures)
    page = commands.write_page([folder], folder)
    if json_:
        show_json(record.to_dict())
        return
    commands.show_audit(folder, record.flags, page)
    commands.print_lines(*summary(record.audit["wire"]))


def check_given(given: Given) -> None:
    """Refuse a mixture of addresses and captures, and options that only an address has."""
    from splitveil.errors import ConfigError

    if given.live and len(given.sources) > 1:
        raise ConfigError(
            f"--wire takes one address, or one or two captures, got {', '.join(given.sources)}"
        )
    if not given.live and (given.token_file is not None or given.ca is not None):
        raise ConfigError("--token-file and --ca can only be given with a server's address")
    if given.live or given.int8:
        with_extra("onnxruntime")


def results_folder(run: Path, out: Path | None) -> Path:
    """Where the results go; never into a run, whose own record they would replace."""
    from splitveil.errors import RunError
    from splitveil.train.files import check_folder

    folder = run / FOLDER if out is None else out
    check_folder(folder, OTHER_OUT)
    if (folder / "config.toml").exists():
        raise RunError(f"{folder} is a trained run; choose another folder with --out")
    return folder


def send(opened: "Opened", given: Given, folder: Path) -> list[Path]:
    """Send the scored images to the server by two starts of the run's client, and record them."""
    from splitveil.audits.captured_requests import send_through

    return send_through(
        find_export(opened.run.path),
        given.sources[0],
        opened.case.scored.images,
        folder,
        token=read_token(given.token_file),
        ca_file=given.ca,
        int8=given.int8,
        waiting=retry_notice(given.sources[0]),
    )


def summary(heard: dict[str, Any]) -> list[str]:
    """What was heard, in lines."""
    lines = [
        f"{tap['capture']}: {tap['rows']} rows in {tap['calls']} calls, {tap['bytes']} bytes"
        for tap in heard["captures"]
    ]
    if "accuracy" in heard:
        lines.append(
            f"accuracy on what was captured: {100 * heard['accuracy']:.2f} %; acc% above is that "
            "on the run's own images, sent here"
        )
    if noise := heard.get("noise"):
        lines.append(
            f"noise: declared {noise['declared']:.4g}, measured {noise['measured']:.4g} (sound: "
            f"{noise['measured_low']:.4g} to {noise['measured_high']:.4g})"
        )
    failed = ", ".join(heard["failed"]) or "none"
    lines.append(f"tests of the noise: {len(heard['tests'])}, failed: {failed}")
    if "slope" in heard["failed"]:
        lines.append("rows in another order than the images fail these tests too: look there first")
    if "difference" in (offline := heard["offline"]):
        lines.append(
            f"{offline['attack']}: MSE {offline['mse']:.4f} in the run's audit, on the wire "
            f"{offline['difference']:+.5f} ({offline['difference_low']:+.5f} to "
            f"{offline['difference_high']:+.5f})"
        )
    return lines
