"""What a client and a server import: no torch, and little else."""

import subprocess
import sys

import pytest

CODE = """
import sys, time
began = time.perf_counter()
{code}
print(time.perf_counter() - began, *[m for m in {heavy!r} if m in sys.modules])
"""
HEAVY = (
    "torch", "onnx", "prometheus_client", "starlette", "uvicorn", "httpx", "PIL", "scipy", "rich",
    "cryptography",
    "filelock",
    "typer",
)  # fmt: skip


def loaded(code: str) -> set[str]:
    """Libraries a fresh process holds after `code`; the time is printed for whoever looks."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code=code, heavy=HEAVY)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seconds, *found = done.stdout.split()
    sys.stdout.write(f"{code}: {seconds} s\n")
    return set(found)


@pytest.mark.parametrize(
    "code",
    [
        "from splitveil.serve import Client",
        "import splitveil; from splitveil.serve import ExportError, Manifest, transport, wire",
    ],
)
def test_a_client_needs_numpy_and_onnxruntime_only(code: str) -> None:
    assert loaded(code) == set()


def test_a_server_needs_no_torch() -> None:
    code = "from splitveil.serve import serve, Limits, make_app, running"
    assert loaded(code) == {"prometheus_client", "starlette", "uvicorn"}  # so imports are seen


def test_an_unknown_name_is_an_attribute_error() -> None:
    from splitveil import serve

    with pytest.raises(
        AttributeError, match=r"module 'splitveil\.serve' has no attribute 'Klient'"
    ):
        _ = serve.Klient
    assert set(dir(serve)) == set(serve.__all__)
