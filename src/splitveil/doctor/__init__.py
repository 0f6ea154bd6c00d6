"""The tuning doctor: reads a run's settings, log and record, and says what to turn, and how far."""

from collections.abc import Callable, Mapping

from splitveil.doctor.case import Case, Finding, Plain
from splitveil.doctor.reading import read_case
from splitveil.insight import diagnosis

Rule = Callable[[Case], tuple[str, str] | None]


RULES: Mapping[str, Rule] = {
    "run not converged": outcome.not_converged,
    "accuracy at chance": outcome.at_chance,
    "accuracy lost": outcome.accuracy_lost,
    "rob_loss stuck at 0": diagnosis.stuck_at_zero,
    "shut-off never opens": diagnosis.never_opens,
    "too few per class": diagnosis.too_few_per_class,
    "values not finite": outcome.not_finite,
    "estimator collapsed": diagnosis.collapsed,
    "attention uniform": diagnosis.uniform_attention,
    "attention one-hot": diagnosis.one_hot_attention,
    "classes still scattered": diagnosis.still_scattered,
    "noise too small": outcome.noise_too_small,
}


def diagnose(case: Case) -> list[Finding]:
    """What is to be mended, in the order to mend it; empty for a healthy run."""
    looked = ((name, rule(case)) for name, rule in RULES.items())
    return [Finding(name=n, seen=found[0], advice=found[1]) for n, found in looked if found]


__all__ = [
    "RULES",
    "Case",
    "Finding",
    "Plain",
    "diagnose",
    "read_case",
]
