"""The commands that deploy a run: `export`, `serve` and `infer`."""

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from splitveil.cli import console
from splitveil.cli.console import OptPath, OptText
from splitveil.errors import ConfigError, DataError
from splitveil.io import opened, printable, read_text, silent

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from splitveil.serve.manifest import Manifest

TokenFile = Annotated[OptPath, Option(help="File with the token (default: $SPLITVEIL_TOKEN).")]
Certificates = Annotated[OptPath, Option(help="PEM certificates to trust for TLS.")]

Verify = Annotated[
    OptPath, Option(help="Public key (PEM, Ed25519) that must have signed the export.")
]
NoNoise = Annotated[bool, Option("--allow-no-noise", help="Accept an export that adds no noise.")]

TOKEN_VARIABLE = "SPLITVEIL_TOKEN"  # noqa: S105 - the name of a variable
EXIT_NOT_REACHED = 3  # the device answered what the server was to answer
REST_SECONDS = 5.0  # after a body is given up, so that the reason arrives before the end
NOTICE_SECONDS = 1.0  # a pause this long is announced; shorter ones would only be noise
MAX_PICTURE, MAX_TOKEN = 1 << 28, 1 << 12  # bytes of their files
PICTURE_MODES = {1: ("1", "L"), 3: ("RGB",)}  # by channels; converting others loses something
NEEDED = ("onnx", "onnxruntime", "onnxscript", "prometheus_client", "starlette", "uvicorn")


def export(  # noqa: PLR0917 - every option of the command, as typer wants them
    run: console.RunFolder,
    out_dir: console.OutFolder = None,
    name: Annotated[OptText, Option(help="Name of the model (default: the run's).")] = None,
    int8: Annotated[
        bool, Option("--int8", help="Also export the client in 8-bit integers.")
    ] = False,
    attacker: Annotated[
        bool, Option("--attacker", help="Also export the strongest decoder of the audit.")
    ] = False,
    sign: Annotated[
        OptPath, Option(help="Private key (PEM, Ed25519) to sign the export with.")
    ] = None,
    overwrite: console.Overwrite = False,
    json_: console.JsonFlag = False,
) -> None:
    """Export client and server of a run as ONNX, with a manifest and a Triton repository.

    They go to the folder `export` of the run, or to that of `--out`. `--int8` needs the run's data
    for calibration. `--attacker` adds the strongest decoder of the run's audit, with which the
    server's page shows what an attacker sees.

    Example: `splitveil export runs/first --int8`
    """
    with_extra()
    console.start()
    from splitveil.runs import EXPORT_FOLDER, export_run, load_run

    target = run / EXPORT_FOLDER if out_dir is None else out_dir
    with console.progress_bar("attacker") if attacker else nullcontext(silent) as progress:
        manifest = export_run(
            load_run(run), target, name=name, int8=int8, attacker=attacker, overwrite=overwrite,
            sign=sign,
            progress=progress,
        )  # fmt: skip
    found = {"export": str(target), "manifest": manifest.to_dict()}
    console.show_result(found, *export_lines(target, manifest), json_=json_)


def export_lines(target: Path, manifest: "Manifest") -> list[str]:
    """What was exported, and what to do with it."""
    from splitveil.serve.manifest import CLIENT_INT8
    from splitveil.serve.stages import describe_noise

    parity, rule = manifest.parity, manifest.rule
    if manifest.silent:
        does, following = "answers alone and sends nothing", f"infer IMAGE --export {target}"
    else:
        noise = describe_noise(manifest.stages)
        does = f"{noise}, {manifest.wire_floats} numbers on the wire"
        following = f"serve {target}"
    worst = parity.get("logits_max_abs_diff", parity.get("own_logits_max_abs_diff"))
    lines = [
        f"{target}: model '{manifest.name}', {does}",
        f"ONNX and torch: logits differ by at most {worst:.2g}",
    ]
    if rule is not None and rule.send is not None:
        lines.append(
            f"exit rule: {rule.kind}, which sends {100 * rule.send:.1f} % of the validation images"
        )
    if "int8_same_answer" in parity:
        lines.append(
            f"int8 client: same answer for {100 * parity['int8_same_answer']:.2f} % of "
            f"{parity['int8_images']} images"
        )
        small = manifest.rule_of(CLIENT_INT8)
        if small is not None and small.changed is not None:
            lines.append(
                f"int8 client: a threshold of its own; it decides otherwise for "
                f"{100 * small.changed:.2f} % of the validation images"
            )
    if manifest.attacker is not None:
        lines.append(
            f"attacker: '{manifest.attacker['attack']}' of the audit, mean squared error "
            f"{manifest.attacker['mse']:.4f} (audit: {manifest.attacker['audited_mse']:.4f})"
        )
    return [*lines, f"next: splitveil {following}"]


def serve(  # noqa: PLR0917 - every option of the command, as typer wants them
    path: Annotated[Path, Argument(help="Folder of an export, or of a run.")],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8000,
    token_file: TokenFile = None,
    tls_cert: Annotated[OptPath, Option(help="PEM certificate with its chain, for TLS.")] = None,
    tls_key: Annotated[OptPath, Option(help="PEM private key of the certificate.")] = None,
    max_batch: Annotated[int, Option(help="Rows that the model computes at once.")] = 64,
    max_delay_ms: Annotated[float, Option(help="Milliseconds a row waits for others.")] = 2.0,
    max_waiting: Annotated[int, Option(help="Rows that may wait; others get a 429.")] = 1024,
    max_in_flight: Annotated[int, Option(help="Requests answered at once.")] = 256,
    max_connections: Annotated[int, Option(help="Connections at once.")] = 1024,
    max_per_address: Annotated[int, Option(help="Connections of one address at once.")] = 256,
    max_header_bytes: Annotated[int, Option(help="Bytes of a request's headers.")] = 16_384,
    header_seconds: Annotated[float, Option(help="For TLS, and for the headers.")] = 10.0,
    body_seconds: Annotated[float, Option(help="For a request's body.")] = 10.0,
    answer_seconds: Annotated[float, Option(help="For an answer.")] = 30.0,
    send_seconds: Annotated[float, Option(help="That a client may read nothing.")] = 10.0,
    idle_seconds: Annotated[float, Option(help="Between two requests.")] = 30.0,
    log_file: Annotated[OptPath, Option(help="Write the log here, 1 MB at most.")] = None,
    access_log: Annotated[bool, Option("--access-log", help="Log answers too.")] = False,
    threads: Annotated[int, Option(min=0, max=1024, help="Threads; 0: one per core.")] = 0,
    allow_no_noise: NoNoise = False,
    verify: Verify = None,
    json_: console.JsonFlag = False,
) -> None:
    """Serve the server's half over HTTP (KServe v2 protocol), with a page for browsers.

    It runs until Ctrl-C or SIGTERM. A run is exported first, into its folder `export`.

    Example: `splitveil serve runs/first --port 8000`
    """
    with_extra()
    from splitveil.runs import find_export
    from splitveil.serve.admission import Limits
    from splitveil.serve.connections import ConnectionLimits
    from splitveil.serve.log import server_log
    from splitveil.serve.page import has_runtime
    from splitveil.serve.server import Tls, load_app
    from splitveil.serve.server import serve as run_server

    console.setup_logging()
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    tls = Tls(certificate=tls_cert, key=tls_key) if tls_cert and tls_key else None
    token = read_token(token_file)
    limits = Limits(
        max_batch=max_batch, max_delay=max_delay_ms / 1000, max_waiting=max_waiting,
        max_in_flight=max_in_flight, read_seconds=body_seconds, answer_seconds=answer_seconds,
    )  # fmt: skip
    connections = ConnectionLimits(
        total=max_connections, per_address=max_per_address, header_bytes=max_header_bytes,
        header_seconds=header_seconds, idle_seconds=idle_seconds, send_seconds=send_seconds,
        body_seconds=body_seconds + REST_SECONDS,
    )  # fmt: skip
    app = load_app(
        find_export(path), limits=limits, token=token, threads=threads,
        allow_no_noise=allow_no_noise, verify=verify,
    )  # fmt: skip
    if host not in ("127.0.0.1", "::1", "localhost") and (token is None or tls is None):
        console.warn(f"listening on {host} without {'a token' if token is None else 'TLS'}")

    def ready(url: str) -> None:
        if json_:
            console.show_json({"url": url})
            sys.stdout.flush()  # a program that waits for the address reads it from a pipe
            return
        console.err.print(
            printable(f"serving {path} at {url}; open it in a browser"), soft_wrap=True
        )
        if not has_runtime():
            console.warn(
                "the page cannot run the client: onnxruntime-web is not here. Run `make web` in "
                "the checkout of SplitVeil, and install it again unless it was installed with "
                "pip's -e; `splitveil infer` needs neither"
            )

    with server_log(log_file, access=access_log):
        run_server(app, host=host, port=port, tls=tls, connections=connections, ready=ready)


def infer(  # noqa: PLR0917 - every option of the command, as typer wants them
    images: Annotated[list[Path], Argument(help="Image files (PNG, JPEG, …).")],
    export_dir: Annotated[Path, Option("--export", help="Folder of the export, with the client.")],
    server: Annotated[
        OptText,
        Option(
            help="Address of the server; a client that answers alone has none.",
            rich_help_panel="Network",
        ),
    ] = None,
    always_ask: Annotated[
        bool, Option("--always-ask", help="Send every image, more than the exit rule allows.")
    ] = False,
    never_ask: Annotated[
        bool, Option("--never-ask", help="Send nothing; the device answers.")
    ] = False,
    token_file: TokenFile = None,
    ca: Certificates = None,
    int8: Annotated[bool, Option("--int8", help="Use the client in 8-bit integers.")] = False,
    capture: Annotated[
        OptPath, Option(help="New file that keeps what is sent, for `audit-wire`.")
    ] = None,
    draws: Annotated[
        OptPath, Option(help="Folder that keeps the draws of noise (default: your state folder).")
    ] = None,
    no_draws: Annotated[
        bool, Option("--no-draws", help="Forget the draws when the command ends.")
    ] = False,
    budget: Annotated[int, Option(help="Different draws that one image may be sent with.")] = 1,
    allow_no_noise: NoNoise = False,
    verify: Verify = None,
    json_: console.JsonFlag = False,
) -> None:
    """Classify images: the client runs here, and only its noisy features go to the server.

    An image that was sent before is sent with the same noise, because a server could average
    different draws. The draws are kept in a private folder as hashes and seeds.

    A client that exits early sends only what it is not sure of. If the server cannot be reached,
    the device answers everything and says so; the exit code is then 3 under `--always-ask`, else 0.

    Example: `splitveil infer cat.png --export runs/first/export --server http://localhost:8000`
    """
    with_extra("onnxruntime")
    import numpy as np

    from splitveil.serve.client import NOT_REACHED, Client
    from splitveil.serve.draws import default_store
    from splitveil.serve.manifest import read_manifest
    from splitveil.serve.transport import safe_text

    manifest = read_manifest(export_dir)
    shape = manifest.image_shape
    if no_draws and draws is not None:
        raise ConfigError("give --draws or --no-draws, not both")
    store = None if no_draws else draws or default_store()
    pixels = np.stack([read_picture(path, shape) for path in images])
    with Client(
        export_dir, server, token=read_token(token_file), ca_file=ca, int8=int8, capture=capture,
        draws=store, budget=budget, allow_no_noise=allow_no_noise, verify=verify,
        always_ask=always_ask, never_ask=never_ask,
        waiting=retry_notice(server or "the server"),
    ) as client:  # fmt: skip
        try:
            if manifest.exit is None:
                client.meet()
        except BaseException:
            if capture is not None:  # nothing was sent; the command must work a second time
                capture.unlink(missing_ok=True)
            raise
        answers = client.classify(pixels)
    rows = [{"image": str(path)} | found for path, found in zip(images, answers, strict=True)]
    lines = [
        f"{safe_text(r['image'])}: {r['name']} ({100 * r['share']:.1f} %), {r['where']}"
        for r in rows
    ]
    console.show_result(rows, *lines, json_=json_)
    if always_ask and any(r["where"] == NOT_REACHED for r in rows):
        raise Exit(EXIT_NOT_REACHED)


def retry_notice(server: str) -> "Callable[[str, float], None]":
    """A function that says on stderr, once and only for a long pause, that we try again."""
    said: list[str] = []

    def notice(problem: str, seconds: float) -> None:
        if seconds >= NOTICE_SECONDS and not said:
            said.append(problem)
            console.warn(f"no answer from {server} yet ({problem}); still trying, Ctrl-C stops")

    return notice


def read_picture(path: Path, shape: tuple[int, ...]) -> "NDArray[np.uint8]":
    """One image file as bytes (c, h, w); it must have the model's size and colours."""
    import numpy as np
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with opened(path, MAX_PICTURE) as file, Image.open(file) as image:
                _check_picture(path, image.mode, image.size, shape)  # before anything is decoded
                pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as err:
        # PIL reports a broken file by any of these, depending on the format.
        raise DataError(f"cannot read {path} as an image: {err}") from err
    return pixels[None] if shape[0] == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _check_picture(path: Path, mode: str, size: tuple[int, int], shape: tuple[int, ...]) -> None:
    """Refuse a picture of another colour or size than the model's (c, h, w)."""
    if mode not in PICTURE_MODES.get(shape[0], ()):
        raise DataError(
            f"{path} has mode {mode}, the model takes {'grey (L)' if shape[0] == 1 else 'RGB'}; "
            "convert it as the training images were"
        )
    if size != (shape[2], shape[1]):
        raise DataError(
            f"{path} is {size[0]}×{size[1]}, the model takes {shape[2]}×{shape[1]}; resize it as "
            "the training images were"
        )


def read_token(file: Path | None) -> str | None:
    """The token from a file or the environment; a command line would show it to other users."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = read_text(file, MAX_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the token in {file}: {err}") from err
    if not token:
        raise ConfigError(f"{file} is empty; it must hold the token")
    return token


def with_extra(*libraries: str) -> None:
    """Say what to install when the optional libraries are missing."""
    from importlib.util import find_spec

    missing = [name for name in libraries or NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command needs {', '.join(missing)}; install them: pip install 'splitveil[serve]'"
        )
