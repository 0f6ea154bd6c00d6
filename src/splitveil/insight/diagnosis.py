"""Rules about the penalty: does it act, is its estimate honest, is it too strong?"""

import math
from statistics import fmean

from splitveil.doctor.case import TAIL, Case, turn
from splitveil.record.schema import number

Seen = tuple[str, str]


ZERO = 1e-9


SHUT = 0.999


COLLAPSED = 0.5


FEW_PER_CLASS = 4.0


CLOSED_GATE = 0.25


STILL = 0.9  # share of the first spread that still counts as not fallen


def stuck_at_zero(case: Case) -> Seen | None:
    """`rob_loss` is 0 at the end: off, in warm-up, shut again, or below its threshold."""
    if "lambd" not in case.config:
        return None
    if not case.penalised:
        return "lambd is 0: the penalty is switched off", "set lambd to its preset (16, veil: 0.3)"
    if not case.active:
        return _still_warming(case)
    values = case.series("rob_loss")
    if max(values[-TAIL:]) > ZERO:
        return None
    if (case.end("shut") or 0.0) >= SHUT:
        return _shut_again(case)
    return _under_threshold(case)


def _still_warming(case: Case) -> Seen:
    done, planned = len(case.epochs), int(case.setting("epochs", len(case.epochs)))
    warm = int(case.setting("attention_warmup_epochs"))
    first = max(
        warm + 1, 2 if case.config.get("skip_first_epoch", "clusters" in case.config) else 1
    )
    seen = f"no penalty in {done} epochs: it starts in epoch {first}, the run has {planned}"
    if first <= planned:
        return seen, f"continue the run past epoch {first} with --resume"
    if planned > 4 * max(warm, 1):
        return seen, f"train for at least {4 * first} epochs"
    knob = turn(case, "attention_warmup_epochs", planned // 4) + ", or " if warm else ""
    return seen, f"{knob}epochs {planned} → {4 * first}"


def _shut_again(case: Case) -> Seen | None:
    """Named here while the early steps run, or when the shut-off had opened before."""
    opened = min(case.series("shut")) < SHUT
    if not opened and _active_steps(case) > case.setting("early_shut_steps"):
        return None  # it never opens: the rule of that name speaks
    rule, value, limit = _holding(case)
    if rule == "early_shut_steps":
        return (
            f"rob_loss is 0: early_shut_steps holds, {value:.0f} of {limit:g} steps are over",
            f"train longer, or {turn(case, rule, value // 10)}",
        )
    return (
        f"rob_loss is 0 again at the end: {rule} holds, the gate's mean is {value:.2f}, "
        f"limit {limit:g}",
        f"{turn(case, rule, _above(value))}; 1 never shuts",
    )


def _under_threshold(case: Case) -> Seen | None:
    """Every variance lies below τ = var_threshold·σ²: halve τ below what is left."""
    if case.at_chance:
        return None  # nothing is left to spread; the rule about chance speaks
    values = case.series("rob_loss")
    last = max((i for i, v in enumerate(values) if v > ZERO), default=-1)
    since = f"rob_loss is 0 since epoch {number(case.active[last + 1], 'epoch') or 0:.0f}"
    if "var_threshold" not in case.config:
        return f"{since}: it has nothing left to lower", "if the attacks still succeed: use veil"
    old, noise = case.setting("var_threshold"), case.setting("noise_std")
    spread = case.end("intra_mse")
    new = old / 2
    if spread is not None and noise > 0 and case.config.get("form") != "trace":
        new = min(new, spread / (2 * noise**2))
    return (
        f"{since}: every variance is under the threshold var_threshold·noise_std² = "
        f"{old * noise**2:.3g} (intra_mse {spread or 0:.3g})",
        f"if the attacks still succeed: {turn(case, 'var_threshold', new)}",
    )


def never_opens(case: Case) -> Seen | None:
    """The early shut-off holds in every epoch in which the penalty could have acted."""
    shut = case.series("shut")
    if not shut or min(shut) < SHUT or _active_steps(case) <= case.setting("early_shut_steps"):
        return None
    rule, value, limit = _holding(case)
    return (
        f"the penalty was shut off in all {len(shut)} epochs after the warm-up: {rule} holds, "
        f"the gate's mean is {value:.2f}, limit {limit:g}",
        f"{turn(case, rule, _above(value))} (1 never shuts), or set statistic=raw, or "
        "penalty=rate, which has no gates",
    )


def _active_steps(case: Case) -> float:
    """Steps with a penalty: from the last step before it to the last one logged."""
    first = number(case.active[0], "epoch") or 1.0
    before = [n for line in case.epochs if (number(line, "epoch") or 0.0) < first
              for n in [number(line, "step")] if n is not None]  # fmt: skip
    return (number(case.epochs[-1], "step") or 0.0) - (before[-1] if before else 0.0)


def _holding(case: Case) -> tuple[str, float, float]:
    """Which shut-off rule holds, its value and its limit, in the order the shut-off reads them."""
    steps, limit = _active_steps(case), case.setting("early_shut_steps")
    if steps <= limit:
        return "early_shut_steps", steps, limit
    hard, top = case.end("hard_gate") or 0.0, case.setting("early_hard_thresh")
    if hard > top:
        return "early_hard_thresh", hard, top
    return "early_gate_thresh", case.end("soft_gate") or 0.0, case.setting("early_gate_thresh")


def _above(value: float) -> float:
    """A limit a little above a gate's mean."""
    return min(1.0, math.ceil(20 * value + 0.4) / 20)


def collapsed(case: Case) -> Seen | None:
    """The surrogate reports less than half of the true rate."""
    ratio = case.end("surrogate_to_true")
    if ratio is None or ratio >= COLLAPSED:
        return None
    seen = f"the surrogate reports {100 * ratio:.0f} % of the true rate; the rest is not protected"
    if "clusters" in case.config:
        clusters = case.setting("clusters")
        return seen, turn(case, "clusters", max(1, clusters // 2)) + ", or use the defence veil"
    now = case.config.get("attention")
    other = "uniform" if now == "maximise" else "maximise"
    return seen, f"attention {now} → {other} and statistic=raw"


def uniform_attention(case: Case) -> Seen | None:
    """The weights never left 1/M_c: the attention has learned nothing."""
    sizes = case.series("effective_sample_size")
    acts = _attends(case) and (case.end("rob_loss") or 0.0) > ZERO
    if not acts or len(sizes) < 5 or min(sizes) <= 0.99:  # noqa: PLR2004
        return None
    return (
        f"the effective sample size never fell below {min(sizes):.3f}: every sample weighs the "
        "same, as without attention",
        f"train the attention faster: {_attention_lr(case, 10.0, 1e-3)}, or save its cost with "
        "attention=uniform",
    )


def one_hot_attention(case: Case) -> Seen | None:
    """A class is judged by hardly more than one sample."""
    size = case.end("effective_sample_size")
    limit = max(0.1, 1.5 / max(case.per_class, 1.0))
    if case.slots:
        limit = min(limit, 0.9 / case.setting("num_slots", 1.0))  # hard, equal slots are fine
    if size is None or not _attends(case) or size >= limit:
        return None
    return (
        f"the effective sample size is {size:.3f} of a class's samples: one sample takes almost "
        "all the weight and its variance says nothing of the others",
        f"attention=uniform, or train it slower: {_attention_lr(case, 0.1, 1e-4)}",
    )


def _attention_lr(case: Case, factor: float, start: float) -> str:
    """Its own Adam at a rate, or that rate times a factor."""
    rate = case.setting("attention_lr")
    if rate:
        return turn(case, "attention_lr", factor * rate)
    return f"attention_lr none → {start:g} (an Adam of its own)"


def _attends(case: Case) -> bool:
    return case.config.get("attention") in ("minimise", "maximise")


def too_few_per_class(case: Case) -> Seen | None:
    """A batch holds too little of a class for a variance, or the class gate is shut by it."""
    if not case.penalised:
        return None
    few = case.per_class < FEW_PER_CLASS and not case.setting("bank")
    a, b, share = case.setting("class_gate_a"), case.setting("class_gate_b"), 1 / case.num_classes
    gate = 1 / (1 + math.exp(min(a * (b - share), 700.0)))
    gated = "class_gate_a" in case.config and case.config.get("penalty") is None
    gated = gated and case.config.get("form", "gated") == "gated"
    if not few and not (gated and gate < CLOSED_GATE):
        return None
    seen = [f"{case.per_class:.1f} samples per class in a batch"] if few else []
    advice = [turn(case, "batch_size", 8 * case.num_classes)] if few else []
    if few and "bank" in case.config:
        advice[0] += f", or {turn(case, 'bank', 64)} rows of each class"
    if gated and gate < CLOSED_GATE:
        seen.append(f"the class gate lets {100 * gate:.0f} % through at p_c = {share:.3g}")
        advice.append(f"{turn(case, 'class_gate_a', a / 4)} or class_gate_b → {share:.3g}")
    if few and case.slots and case.config.get("penalty") is None:
        advice.append("relax the early shut-off: early_hard_thresh and early_gate_thresh → 1")
    return "; ".join(seen), "; ".join(advice)


def still_scattered(case: Case) -> Seen | None:
    """One gated attention per class, and the spread within classes does not fall."""
    values = case.series("intra_mse")
    gated = _attends(case) and not case.slots and "form" in case.config
    if not gated or len(values) < 2 * TAIL or (case.end("rob_loss") or 0.0) <= ZERO:
        return None
    first, last = fmean(values[:TAIL]), fmean(values[-TAIL:])
    if last <= STILL * first:
        return None
    stronger = turn(case, "lambd", 2 * case.setting("lambd"))
    advice = (
        "one pool per class sees one cluster: use the defence slot-cross (num_slots 8), or the "
        f"honest penalty=rate with statistic=raw; else {stronger}"
    )
    if case.config.get("penalty") == "rate":
        longer = turn(case, "epochs", 2 * case.setting("epochs"))
        advice = f"{longer}, since the penalty needs time at full weight; else {stronger}"
    return (
        f"intra_mse went from {first:.3g} to {last:.3g}: classes are as scattered as at the start",
        advice,
    )
