"""Why a run does or does not protect: one sentence from measured values by plain rules.

The outcome comes from the audit, its cause from the first rule that applies: nothing hides the
images, the penalty did not act, the noise is small, the client is close to a linear map, the
estimator does not see what leaks, the wire keeps light and shade. A run that answers badly is never
praised for what it hides.
"""

from dataclasses import dataclass
from typing import Literal

from splitveil.insight.diagnosis import (
    HALF_LOG_TWO,
    RunHistory,
    collapsed,
    never_opens,
    noise_too_small,
    still_scattered,
    stuck_at_zero,
)
from splitveil.record.files import RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import AT_CHANCE, FAR_BELOW, Record, exposure_of, sends_part
from splitveil.report.answer_page import Fact
from splitveil.report.gains import FAR, client_of, images_of, undefended
from splitveil.report.words import Sentence, Value, sentence
from splitveil.table import percent

MUCH, LITTLE = 0.5, 0.1  # leakage from which a run does not protect, and under which it does
NEAR = 0.05  # of leakage: a defence that lowers it by less does little
UNLIKE = 0.15  # of leakage between thumbnail and detail, from which one of them leaks more
ALMOST = 0.8  # of what the strongest attack rebuilds
UNCONVERGED = "decoder not converged"
Shows = Literal["noise", "training"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Why a run does or does not protect.

    Args:
        said: The sentences, the outcome and its cause first.
        facts: The two or three figures that carry them.
        shows: Which picture shows the cause; None where there is nothing to show.
        poor: Whether it answers too badly to be praised for anything.
    """

    said: tuple[Sentence, ...]
    facts: tuple[Fact, ...]
    shows: Shows | None = "noise"
    poor: bool = False


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What explains an outcome; without a text, nothing that was measured does."""

    text: Sentence | None = None
    facts: tuple[Fact, ...] = ()
    shows: Shows = "noise"

    @property
    def clause(self) -> Value:
        """As the end of a sentence."""
        return "" if self.text is None else phrase("because", cause=self.text)


def phrase(key: str, **values: Value) -> Sentence:
    """A sentence of the verdict's, see `[cause]` in `report/locale/`."""
    return sentence(f"cause.{key}", **values)


def fact(key: str, value: str, **values: Value) -> Fact:
    """A figure under its label."""
    return Fact(value=value, label=phrase(key, **values))


def judge(case: RunHistory, above: float | None = None) -> Judgement:
    """Why a run does or does not protect.

    Args:
        case: The run with its log, its record and the runs beside it.
        above: Share of the dimensions that differ more within a class than the noise; None if it
            was not looked at.
    """
    record = case.beside
    if (lost := _gave_up_the_answers(case, record)) is not None:
        return lost
    if record.sent == 0:
        right = percent(record.accuracy, 1)
        answers = fact("accuracy-label", f"{right} %")
        return Judgement(said=(phrase("silent", accuracy=right),), facts=(answers,), shows=None)
    part = sends_part(record)
    leak, exposed = record.leakage_sent if part else record.leakage, exposure_of(record)
    if leak is None or exposed is None:
        return Judgement(said=(phrase("unaudited"),), facts=())
    hides = exposed < LITTLE
    outcome = phrase("hides" if hides else "leaks" if exposed >= MUCH else "partly")
    found = _hidden_by(case) if hides else _cause(case, above)
    told = phrase("split", outcome=outcome, rebuilt=_share(leak), because=found.clause)
    if part:
        kept = f"{10 * (1 - (record.sent or 0.0)):.0f}"
        told = phrase(
            "exit", outcome=outcome, rebuilt=_share(leak), because=found.clause, kept=kept,
            exposure=_share(exposed),
        )  # fmt: skip
    said, bare = [told], undefended_beside(case)
    known = None if bare is None else bare.record.leakage
    if bare is not None and known is not None:
        key = "no-better" if known - exposed < NEAR else "undefended"
        said.append(phrase(key, name=bare.name, bare=_share(known)))
    low, detail = _bands(record)
    if not hides and abs(low - detail) >= UNLIKE and found.text != _coarse(record):
        key = "coarse" if low > detail else "fine"
        said.append(phrase(key, low=_share(low), detail=_share(detail)))
    if UNCONVERGED in record.flag_names:
        said.append(phrase("unconverged"))
    return Judgement(said=tuple(said), facts=_facts(found, record, known), shows=found.shows)


def _gave_up_the_answers(case: RunHistory, record: Record) -> Judgement | None:
    """A model at chance, or far below its net without the defence, has nothing to praise."""
    right, could = _right(case)
    dead = case.at_chance or AT_CHANCE in record.flag_names
    far = could is not None and right is not None and could - right > FAR
    if not (dead or far or FAR_BELOW in record.flag_names):
        return None
    guess, weight = f"{100 / case.num_classes:.0f}", case.end("weight")
    facts = [fact("accuracy-label", f"{percent(right, 1)} %")]
    if far:
        facts.append(fact("could-label", f"{percent(could, 1)} %"))
    if dead:
        heavy = Cause(text=phrase("too-strong") if case.penalised and case.active else None)
        told = phrase("dead", accuracy=percent(right, 1), guess=guess, because=heavy.clause)
        facts.append(fact("guess-label", f"{guess} %"))
        if heavy.text is not None and weight is not None:
            facts.append(fact("weight-label", f"{weight:.3g}"))
    elif far and case.plain is not None:
        told = phrase("crippled", accuracy=percent(right, 1), name=case.plain.name,
                   could=percent(could, 1))  # fmt: skip
    else:
        told = phrase("far-below", accuracy=percent(right, 1))
    return Judgement(said=(told,), facts=tuple(facts), shows="training", poor=True)


def _right(case: RunHistory) -> tuple[float | None, float | None]:
    """Right answers of the run and of the plain one, on the same images: audited, else logged."""
    mine, plain = case.record.accuracy, case.plain
    theirs = None if plain is None else plain.record.accuracy
    if mine is not None and (theirs is not None or plain is None):
        return mine, theirs
    return case.accuracy, None if plain is None else plain.accuracy


def _hidden_by(case: RunHistory) -> Cause:
    """Why little is rebuilt: the noise is as strong as what tells images of a class apart."""
    rate = case.rate
    if rate is None or rate > HALF_LOG_TWO:
        return Cause()
    return Cause(text=phrase("noise-wins"), facts=(_rate_fact(rate),))


def _cause(case: RunHistory, above: float | None) -> Cause:
    """Why images can be rebuilt, by the first rule that applies."""
    trained = _nothing_hides(case) or _unfelt(case) or _little_noise(case, above)
    found = trained or _linear(case.record) or _blind(case)
    return found or Cause(text=_coarse(case.record))


def _nothing_hides(case: RunHistory) -> Cause | None:
    """There is neither noise nor a penalty, or a penalty without noise."""
    if "noise_std" not in case.config or case.setting("noise_std") > 0:
        return None
    if case.penalised:
        return Cause(text=phrase("no-noise"))
    return Cause(text=phrase("bare")) if case.config.get("defence") == "none" else None


def _unfelt(case: RunHistory) -> Cause | None:
    """The penalty was 0, or its own rules kept it off."""
    seen = (stuck_at_zero(case) or never_opens(case)) if case.epochs else None
    return None if seen is None else Cause(text=phrase("unfelt", seen=seen[0]), shows="training")


def _little_noise(case: RunHistory, above: float | None) -> Cause | None:
    """More signal than noise in an average dimension."""
    rate, noise = case.rate, case.setting("noise_std")
    if rate is None or noise_too_small(case) is None:
        return None
    little = phrase("little-noise", noise=f"{noise:g}")
    if above is None:
        return Cause(text=little, facts=(_rate_fact(rate),))
    share = percent(above, 0)
    return Cause(
        text=phrase("loud", noise=f"{noise:g}", above=share),
        facts=(fact("above-label", f"{share} %"), _rate_fact(rate)),
    )


def _blind(case: RunHistory) -> Cause | None:
    """The estimator reports less than what leaks, or one pool cannot see a class's clusters."""
    seen = collapsed(case) or still_scattered(case)
    return None if seen is None else Cause(text=phrase("estimator", seen=seen[0]), shows="training")


def _linear(record: Record) -> Cause | None:
    """Ridge regression alone rebuilds almost as much as the strongest attack."""
    mse, known = record.attacks.get("linear"), record.ceiling.mse
    if mse is None or mse.mse is None or not known or record.leakage is None or sends_part(record):
        return None
    alone = 1 - mse.mse / known
    if alone < ALMOST * record.leakage:
        return None
    facts = (fact("linear-label", f"{_share(alone)} %"),)
    return Cause(text=phrase("linear", alone=_share(alone)), facts=facts)


def _coarse(record: Record) -> Sentence | None:
    """Light and shade of large areas reach the server."""
    low, detail = _bands(record)
    if low - detail < UNLIKE:
        return None
    return phrase("keeps-low", low=_share(low), detail=_share(detail))


def _facts(found: Cause, record: Record, bare: float | None) -> tuple[Fact, ...]:
    facts = list(found.facts)
    low, detail = _bands(record)
    if record.leakage_bands:
        facts.append(fact("bands-label", f"{_share(low)} % / {_share(detail)} %"))
    if bare is not None:
        facts.append(fact("undefended-label", f"{_share(bare)} %"))
    return tuple(facts[:3])


def _bands(record: Record) -> tuple[float, float]:
    low, detail = (record.leakage_bands.get(key) or 0.0 for key in ("low", "detail"))
    return low, detail


def _rate_fact(rate: float) -> Fact:
    return fact("rate-label", f"{rate:.2f}", limit=f"{HALF_LOG_TWO:.2f}")


def undefended_beside(case: RunHistory) -> RunFiles | None:
    """An audited run beside it without a penalty: same client, images and budget of the attacks."""
    own = Group("", ((case.record,),))
    if undefended(own):
        return None
    plain = None if case.plain is None else case.plain.files
    near = [] if plain is None or not plain.audited else kinds([plain])
    for row in (*near, *case.rows):
        same = images_of(row) == images_of(own) and client_of(row) == client_of(own)
        if same and undefended(row) and profiles(row) == profiles(own):
            return row.runs[0]
    return None


def profiles(row: Group) -> set[str | None]:
    """Budgets of the attacks that a row's records are of."""
    return {record.audit.profile for record in row.records}


def _share(leakage: float) -> str:
    """A leakage in whole per cent; one below 0 has nothing more to hide."""
    return f"{100 * max(leakage, 0.0):.0f}"
