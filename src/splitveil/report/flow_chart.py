"""The flow chart of a run, drawn from its configuration and its model."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from splitveil.io import Json
from splitveil.report.canvas import GREY, PALETTE, Drawing, sheet, shown
from splitveil.report.words import Lang, translated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from splitveil.config.resolve import DataFacts
    from splitveil.nets.split import SplitModel


@dataclass(frozen=True)
class FlowStep:
    """A heading and the lines below it."""

    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Boxes from the image to the answer, and those of the penalty, which leaves after the client.

    `client` is the place of the client among `wire`; `back` is written at the way back.
    """

    wire: tuple[FlowStep, ...]
    client: int = 1
    penalty: tuple[FlowStep, ...] = ()
    back: str = ""


def run_flow(
    config: Json,
    model: "SplitModel",
    data: "DataFacts",
    stages: tuple[FlowStep, ...],
    *,
    statistic: str | None = None,
    companion: tuple[FlowStep, ...] = (),
) -> Flow:
    """The flow of a run: `stages` are its channel's, `statistic` what its surrogate measures.

    `companion` stands for what trains beside the model.
    """
    shape, sent = data.image_shape, model.wire_floats(data.image_shape)
    client = (f"net {config.get('net')}", f"{model.client_params():,} parameters",
              f"{model.macs(shape):,} MACs")  # fmt: skip
    server_params = sum(p.numel() for p in model.head.parameters())
    wire = (
        FlowStep("image", ("×".join(map(str, shape)),)),
        FlowStep("client", client),
        *(stages or (FlowStep("channel", ("sends z as it is",)),)),
        FlowStep("wire", (f"{sent} numbers", f"{4 * sent:,} bytes")),
        FlowStep("server", (f"{server_params:,} parameters",)),
        FlowStep("answer", (f"{data.num_classes} classes", "cross-entropy")),
    )
    boxes = penalty_boxes(config, statistic) or companion
    return Flow(wire=wire, penalty=boxes, back=way_back(config) if boxes else "")


def penalty_boxes(config: Json, statistic: str | None) -> tuple[FlowStep, ...]:
    """The penalty's path, box by box; empty for a defence without one.

    >>> [box.title for box in penalty_boxes({"clusters": 5, "lambd": 16.0, "form": "hinge"}, None)]
    ['k-means', 'variance hinge', 'weight']
    """
    if not config.get("lambd"):
        return ()
    form = (_form(config),) if "attention" in config or "clusters" in config else ()
    return (*_measure(config, statistic), *form, *_shutoff(config), _weight(config))


def _measure(config: Json, statistic: str | None) -> tuple[FlowStep, ...]:
    """What is looked at, and who looks."""
    if "clusters" in config:
        return (
            FlowStep("k-means", (f"{config['clusters']} clusters per class", "refit every epoch")),
        )
    if "attention" not in config:
        return (FlowStep("surrogate", (str(config.get("defence")),)),)
    looked = FlowStep("statistic", ("LayerNorm(z)" if statistic == "layernorm" else "raw z",))
    bank = (f"bank of {config['bank']} rows",) if config.get("bank") else ()
    trained = {"minimise": "lowers the penalty", "maximise": "raises it: adversary",
               "uniform": "uniform weights"}[str(config.get("attention"))]  # fmt: skip
    if "num_slots" in config:
        slots = (f"{config['num_slots']} per class, {config['num_iterations']} rounds",
                 f"{config['num_heads']}-head cross-attention")  # fmt: skip
        return looked, FlowStep("slots", (*slots, trained, *bank))
    return looked, FlowStep("gated attention", ("over a class's samples", trained, *bank))


def _form(config: Json) -> FlowStep:
    """The formula of the penalty."""
    noise = config.get("noise_std") or 0.0
    threshold = f"τ = {config.get('var_threshold', 0) * noise**2:.2g}"
    if config.get("penalty") == "rate":
        return FlowStep("rate", ("½ log(1 + v/σ²)", f"σ = {noise:g}", "per class"))
    if "clusters" in config:
        if config.get("form") == "logdet":
            return FlowStep(
                "log-determinant", (f"σ = {noise:g}", f"{config['covariance']} covariance")
            )
        return FlowStep("variance hinge", (threshold, f"γ = {config.get('gamma', 0):g}"))
    if config.get("form", "gated") == "gated":
        snr = f"SNR gate at {config['snr_thresh']:g}"
        soft = f"softplus, margin {config['margin_m']:g}"
        return FlowStep("gates", ("soft gate (learned)", snr, soft, threshold))
    word = "log variance" if config["form"] == "hinge" else "log of the trace"
    return FlowStep("hinge", (word, threshold))


def _shutoff(config: Json) -> tuple[FlowStep, ...]:
    if "early_shut_steps" not in config or config.get("penalty") == "rate":
        return ()
    lines = (f"{config['early_shut_steps']} early steps",
             f"hard gate > {config['early_hard_thresh']:g}",
             f"soft gate > {config['early_gate_thresh']:g}")  # fmt: skip
    return (FlowStep("shut off while", lines),)


def _weight(config: Json) -> FlowStep:
    lines = [f"λ = {config['lambd']:g}"]
    if "attention_loss_scale" in config:
        lines.append(f"scale = {config['attention_loss_scale']:g}")
    if config.get("w_lr") == "cem":
        lines.append("w = 0.001/lr")
    if config.get("ramp"):
        lines.append(f"ramp over {100 * config['ramp']:.0f} %")
    return FlowStep("weight", (*lines, f"from epoch {first_epoch(config)}"))


def first_epoch(config: Json) -> int:
    """The first epoch in which the penalty acts.

    >>> first_epoch({"attention_warmup_epochs": 5}), first_epoch({"clusters": 5})
    (6, 2)
    """
    skipped = bool(config.get("skip_first_epoch", "clusters" in config))
    return max(int(config.get("attention_warmup_epochs") or 0), int(skipped)) + 1


def way_back(config: Json) -> str:
    """What the client's gradient is multiplied by."""
    if not config.get("lambd"):
        return "its gradient reaches the client"
    factor = config["lambd"] * config.get("attention_loss_scale", 1.0)
    rate = " · w" if config.get("w_lr") == "cem" else ""
    server = "the server learns from the cross-entropy alone"
    return f"gradient × {factor:g}{rate} to the client; {server}"


WIDE, TALL, GAP = 1.42, 1.12, 0.3  # inches
BELOW = TALL + 1.4 * GAP  # from one row of boxes down to the other
SIGNS = 22  # per line of a box
TOP, LOW = "#e8f1f8", "#fdeee4"


def draw_flow_chart(flow: Flow, lang: Lang = "en") -> bytes:
    """PNG: image → client → channel → wire → server above, the penalty's path below."""
    flow = in_words_of(flow, lang)
    first = flow.client + 1  # the penalty starts under what the client sends
    columns = max(len(flow.wire), first + len(flow.penalty))
    width = columns * WIDE + (columns + 1) * GAP
    height = TALL + 2 * GAP + (BELOW + 0.8 * GAP if flow.penalty else 0)
    level = height - GAP - TALL
    with sheet(width, height) as (figure, axes):
        _draw_row(axes, flow.wire, 0, level, (TOP, PALETTE[0]))
        if flow.penalty:
            _draw_row(axes, flow.penalty, first, level - BELOW, (LOW, PALETTE[1]))
            _join_rows(axes, flow, level)
        return Drawing(figure).png


def in_words_of(flow: Flow, lang: Lang) -> Flow:
    """The flow with its texts in a language, `[box]` in `locale/`."""

    def told(steps: tuple[FlowStep, ...]) -> tuple[FlowStep, ...]:
        return tuple(
            FlowStep(translated(step.title, lang), tuple(translated(x, lang) for x in step.lines))
            for step in steps
        )

    back = translated(flow.back, lang)
    return replace(flow, wire=told(flow.wire), penalty=told(flow.penalty), back=back)


def _left(column: int) -> float:
    """Left edge of a column of boxes."""
    return GAP + column * (WIDE + GAP)


def _draw_row(
    axes: "Axes", boxes: Sequence[FlowStep], first: int, level: float, inks: tuple[str, str]
) -> None:
    """Boxes from the column `first` on, in the colours of paper and edge, with arrows between."""
    for at, box in enumerate(boxes):
        left, middle = _left(first + at), level + TALL / 2
        _draw_box(axes, box, (left, level), inks)
        if at:
            _arrow(axes, [(left - GAP, middle), (left, middle)])


def _join_rows(axes: "Axes", flow: Flow, level: float) -> None:
    """The way of z down to the penalty, and that of its gradient back to the client."""
    ink, low, first = PALETTE[1], level - BELOW, flow.client + 1
    tap, middle = _left(first) - GAP / 2, low + TALL / 2
    _arrow(axes, [(tap, level + TALL / 2), (tap, middle), (_left(first), middle)], ink=ink)
    axes.text(tap + 0.05, level - 0.55 * GAP, "z", color=ink, weight="bold")
    home, end = _left(flow.client) + WIDE / 3, _left(flow.client + len(flow.penalty)) + WIDE / 2
    floor = low - 0.6 * GAP
    _arrow(axes, [(end, low), (end, floor), (home, floor), (home, level)], ink=ink, dash="--")
    middle = (home + end) / 2
    axes.text(middle, floor - 0.06, flow.back, color=ink, ha="center", va="top", fontsize=8)


def _draw_box(
    axes: "Axes", box: FlowStep, corner: tuple[float, float], inks: tuple[str, str]
) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = corner
    patch = FancyBboxPatch(corner, WIDE, TALL, boxstyle="round,pad=0,rounding_size=0.08",
                           facecolor=inks[0], edgecolor=inks[1], linewidth=1.2)  # fmt: skip
    axes.add_patch(patch)
    lines = [part for line in box.lines for part in textwrap.wrap(shown(line, 60), SIGNS)]
    middle, top = x + WIDE / 2, y + TALL / 2 + 0.075 * (len(lines) + 0.3)
    here: dict[str, Any] = {"ha": "center", "va": "center"}
    axes.text(middle, top, shown(box.title, 24), weight="bold", fontsize=8.5, **here)
    for at, line in enumerate(lines, start=1):
        axes.text(middle, top - 0.02 - 0.15 * at, line, fontsize=7.2, **here)


def _arrow(
    axes: "Axes", points: Sequence[tuple[float, float]], ink: str = GREY, dash: str = "-"
) -> None:
    """A line through the points with its head at the last one."""
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, dash, color=ink, linewidth=1.3, solid_joinstyle="miter")
    style = {"arrowstyle": "-|>", "color": ink, "linewidth": 0, "mutation_scale": 11,
             "shrinkA": 0, "shrinkB": 0}  # fmt: skip
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=style)
