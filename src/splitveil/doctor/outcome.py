"""Rules about the outcome: accuracy, noise, numbers that were not finite, an end too early."""

import math
from statistics import fmean

from splitveil.doctor.case import TAIL, Case, turn
from splitveil.record.schema import number

Seen = tuple[str, str]


LOST = 0.02


HALF_LOG_TWO = 0.5 * math.log(2)  # nats per dimension where signal and noise are equally strong


STEEP = 0.02  # relative fall of the task loss per epoch


LEARNED = 0.02  # task loss under which there is nothing left to learn


BESIDE_RATES = ("adversary_lr", "patrol_lr", "scissors_lr")  # of what learns beside the model


STRENGTHS = ("_strength", "_beta", "dropout", "prune", "noise_std")  # ends of knobs to halve


def accuracy_lost(case: Case) -> Seen | None:
    """Accuracy fell from its best, or lies far below a run without a penalty."""
    now = case.accuracy
    if now is None or case.at_chance:
        return None
    values = case.series("val_accuracy")
    best = max((fmean(values[i : i + TAIL]) for i in range(len(values) - TAIL + 1)), default=0.0)
    said = []
    if best - now > LOST:
        said.append(f"validation accuracy fell from {100 * best:.1f} to {100 * now:.1f} %")
    far = case.plain is not None and case.plain.accuracy - now > LOST
    if case.plain is not None and far and not_converged(case) is None:
        said.append(
            f"accuracy is {100 * now:.1f} %, that of the plain run '{case.plain.name}' "
            f"{100 * case.plain.accuracy:.1f} %"
        )
    return ("; ".join(said), _weaker(case)) if said else None


def _weaker(case: Case) -> str:
    """Half the weight and a higher threshold, or the defence's own strength."""
    if not case.penalised:
        keys = [key for key in case.config if key.endswith(STRENGTHS) and case.setting(key)]
        knobs = [turn(case, key, case.setting(key) / 2) for key in keys]
        knobs += [turn(case, "bits", 2 * case.setting("bits"))] if "bits" in case.config else []
        return " or ".join(knobs) or turn(case, "lr", case.setting("lr") / 2)
    scale = case.setting("attention_loss_scale", 1.0)
    key = "attention_loss_scale" if "attention_loss_scale" in case.config else "lambd"
    advice = turn(case, key, (scale if key != "lambd" else case.setting("lambd")) / 2)
    if case.config.get("penalty") == "rate" or "var_threshold" not in case.config:
        return f"{advice}; {turn(case, 'ramp', 0.5)}" if case.setting("ramp") < 0.5 else advice  # noqa: PLR2004
    return f"{advice}; {turn(case, 'var_threshold', 4 * case.setting('var_threshold'))}"


def at_chance(case: Case) -> Seen | None:
    """Under a penalty nothing is learned at all."""
    weight = case.end("weight")
    if not case.penalised or not case.active or not case.at_chance:
        return None
    seen = (
        f"accuracy {100 * (case.accuracy or 0):.1f} % is that of guessing "
        f"({100 / case.num_classes:.1f} %) under the weight {weight or 0:.3g}"
    )
    if case.setting("ramp") == 0:
        return seen, f"let the weight grow: {turn(case, 'ramp', 0.5)}; else {_tenth(case)}"
    return seen, _tenth(case)


def _tenth(case: Case) -> str:
    return turn(case, "lambd", case.setting("lambd") / 10)


def not_finite(case: Case) -> Seen | None:
    """The guard left out a penalty whose loss or gradient was not finite."""
    skipped = max(case.series("skipped"), default=0.0)
    if skipped == 0:
        return None
    steps = number(case.epochs[-1], "step") or skipped
    advice = turn(case, "lr", case.setting("lr") / 2)
    if case.penalised:
        advice = f"{turn(case, 'lambd', case.setting('lambd') / 2)} or {advice}"
    for key in (key for key in BESIDE_RATES if key in case.config):
        advice += f" or {turn(case, key, case.setting(key) / 10)}"
    if "eps" in case.config:
        advice += f"; if it goes on, {turn(case, 'eps', 10 * case.setting('eps'))}"
    if "margin_m" in case.config and case.config.get("penalty") is None:
        advice += f" and {turn(case, 'margin_m', 2 * case.setting('margin_m'))}"
    return (
        f"the penalty or its gradient was not finite and left out {skipped:.0f} times "
        f"in {steps:.0f} steps",
        advice,
    )


def noise_too_small(case: Case) -> Seen | None:
    """More signal than noise on the wire, in nats per dimension."""
    if "noise_std" not in case.config or not _noisy(case):
        return None
    noise = case.setting("noise_std")
    if noise == 0:
        return (
            "noise_std is 0: without noise the rate is infinite and the penalty bounds nothing",
            turn(case, "noise_std", 0.05),
        )
    rate = case.rate
    if rate is None or round(rate, 2) <= round(HALF_LOG_TWO, 2):  # as it is printed
        return None
    factor = math.sqrt(math.expm1(2 * min(rate, 20.0)))
    advice = turn(case, "noise_std", factor * noise)
    if case.penalised:
        advice += f" or {turn(case, 'lambd', 2 * case.setting('lambd'))}"
    return (
        f"{rate:.2f} nats per dimension pass the channel beyond the class; where signal and noise "
        f"are equally strong it is {HALF_LOG_TWO:.2f}",
        advice,
    )


def _noisy(case: Case) -> bool:
    return case.penalised or case.setting("noise_std") > 0


def not_converged(case: Case) -> Seen | None:
    """The run was stopped, or its loss was still falling when it ended."""
    done = int(number(case.epochs[-1], "epoch") or len(case.epochs))
    planned = int(case.setting("epochs", done))
    if done < planned:
        return f"the run stopped after epoch {done} of {planned}", "continue it with --resume"
    losses = case.series("task_loss")
    span = max(1, len(losses) // 10)
    again = f"epochs {planned} → {math.ceil(1.5 * planned)}, from the start (--overwrite)"
    if len(losses) < TAIL + 1:
        return f"{len(losses)} epochs are too few to judge", f"epochs {planned} → {10 * planned}"
    if case.at_chance and case.penalised:
        return None
    before, last = fmean(losses[-2 * span : -span]), fmean(losses[-span:])
    if before <= 0 or last <= LEARNED:
        return None
    fall = 1 - (last / before) ** (1 / span) if last > 0 else 1.0
    if fall <= STEEP:
        return None
    return f"the task loss still fell by {100 * fall:.0f} % per epoch, to {last:.3g}", again
