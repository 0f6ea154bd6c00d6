"""Flags of a real wire: what `noise_tests` heard, in words. See `docs/flags.md`."""

from collections.abc import Callable, Mapping

from splitveil.types import Json

SILENT = 0.01  # of the declared noise: less is none
SURE = 1e-3  # p-value below which two audits differ


def _failed(heard: Json, *names: str) -> str | None:
    """What the first failed test of some of the wire saw."""
    for name in heard.get("failed", ()):
        if name in names:
            test = heard["tests"][name]
            return f"test '{name}' saw {test['seen']:.3g}, p = {test['p']:.2g}"
    return None


def wire_without_noise(heard: Json) -> str | None:
    """A client whose noise is off, or weaker than the one that was audited."""
    noise = heard.get("noise")
    seen = _failed(heard, "quieter", "nearer")
    if seen is None or noise is None:
        return seen
    return (
        f"the noise of {heard['images']} images has deviation {noise['measured']:.4g}; "
        f"declared is {noise['declared']:.4g}, which gives no less than {noise['measured_low']:.4g}"
    )


def wire_noise_repeats(heard: Json) -> str | None:
    """Noise that can be seen twice can be taken away: it came from a seed."""
    noise = heard.get("noise", {})
    if noise and noise["measured"] < SILENT * noise["declared"]:
        return None  # nothing repeats itself everywhere; the other flag says it
    return _failed(heard, "repeats", "starts")


def wire_noise_differs(heard: Json) -> str | None:
    """Noise of another size, kind or order than the channel's."""
    noise = heard.get("noise", {})
    if noise and noise["measured"] < SILENT * noise["declared"]:
        return None
    return _failed(heard, "louder", "farther", "shape", "next image", "next number", "other number")


def wire_of_another(heard: Json) -> str | None:
    """What was sent is not centred on the z of the audited encoder."""
    return _failed(heard, "offset", "slope", "different")


def wire_carries_more(heard: Json) -> str | None:
    """Fields of a request that no attack looked at."""
    beside = heard.get("beside", ())
    return f"requests hold {', '.join(beside)}" if beside else None


def wire_leaks_more(heard: Json) -> str | None:
    """The same attack does better on the wire than it did in the run's audit."""
    found = heard.get("offline", {})
    if found.get("p", 1.0) >= SURE or found["difference"] >= 0:
        return None
    return (
        f"{found['attack']} has MSE {found['mse'] + found['difference']:.4f} on the wire, "
        f"{found['mse']:.4f} in the run's audit"
    )


WIRE_CHECKS: Mapping[str, tuple[Callable[[Json], str | None], str]] = {
    "noise missing on the wire": (
        wire_without_noise,
        "do not use this client: switch its noise on, or audit a run with the noise it has",
    ),
    "noise repeats on the wire": (
        wire_noise_repeats,
        "draw noise from the operating system's generator, without a seed",
    ),
    "noise not as declared on the wire": (
        wire_noise_differs,
        "make the client's channel the one that was audited",
    ),
    "another client on the wire": (
        wire_of_another,
        "deploy the encoder of this run, or audit the one that is deployed",
    ),
    "more than z on the wire": (
        wire_carries_more,
        "send the tensor and its description alone",
    ),
    "wire leaks more than the audit": (
        wire_leaks_more,
        "believe this record, and find out what the deployed client does differently",
    ),
}
