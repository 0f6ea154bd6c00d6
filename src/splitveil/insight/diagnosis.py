"""Rules about a run: what to turn, and how far."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from statistics import fmean

from splitveil.audits.flags import fall_per_epoch
from splitveil.config.run_config import read_toml
from splitveil.errors import RunError, SplitVeilError
from splitveil.io import Json
from splitveil.record.files import RunFiles, read_run
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import NOT_NEEDED, Record, number, sends_part
from splitveil.report.flow_chart import first_epoch
from splitveil.report.gains import beside, exposure_over, gains, images_of
from splitveil.report.words import Lang, Sentence, Value, sentence, translated, written
from splitveil.table import NOTHING, percent

TAIL = 3  # epochs that stand for "at the end"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One problem of a run: what was seen, in numbers, and which setting to change, and how far.

    `name` is the rule's, in English; its Chinese name is under `[rule]` in `report/locale/zh.toml`.
    """

    name: str
    seen: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as the doctor sees it.

    Args:
        name: Its name.
        config: Settings of run and defence in one flat mapping.
        epochs: The epoch lines of its log; the rules need at least one.
        num_classes: Classes of its dataset.
        record: Its audit's record; empty without one.
        plain: A run on the same data without a penalty, which shows the accuracy to expect.
        rows: The audited runs beside it, which show whether its server is worth it.
        files: What was read from its folder.
    """

    name: str
    config: Json
    epochs: tuple[Json, ...]
    num_classes: int
    record: Record = field(default_factory=lambda: Record.from_dict({}))
    plain: "RunHistory | None" = None
    rows: tuple[Group, ...] = ()
    files: RunFiles | None = None

    def setting(self, key: str, default: float | int = 0) -> float:
        """A numeric setting; the default where the defence has no such setting."""
        found = number(self.config, key)
        return float(default) if found is None else found

    @property
    def penalised(self) -> bool:
        """Whether the settings ask for a penalty."""
        return self.setting("lambd") > 0

    @property
    def active(self) -> tuple[Json, ...]:
        """The epochs in which the penalty acted, or was shut off by its own rules."""
        return tuple(line for line in self.epochs if number(line, "rob_loss") is not None)

    @property
    def beside(self) -> Record:
        """Its record with what it says beside the other rows."""
        return beside(self.record, self.rows)

    @property
    def per_class(self) -> float:
        """Samples of one class in a batch when all classes are equally frequent."""
        return self.setting("batch_size") / self.num_classes

    def series(self, key: str) -> list[float]:
        """What was logged under a key, epoch by epoch; epochs without it are left out.

        >>> lines = ({"epoch": 1}, {"epoch": 2, "rob_loss": 0.5})
        >>> RunHistory(name="x", config={}, epochs=lines, num_classes=2).series("rob_loss")
        [0.5]
        """
        values = (number(line, key) for line in self.epochs)
        return [value for value in values if value is not None]

    def end(self, key: str) -> float | None:
        """Mean of the last three logged values."""
        values = self.series(key)
        return fmean(values[-TAIL:]) if values else None

    @property
    def accuracy(self) -> float | None:
        """Accuracy at the end: validation, else the audit's, else in training."""
        validated = self.end("val_accuracy")
        known = [validated, self.record.accuracy, self.end("train_accuracy")]
        return next((value for value in known if value is not None), None)

    @property
    def at_chance(self) -> bool:
        """Whether nothing was learned: less than a tenth of the way from guessing to 100 %."""
        guess = 1 / self.num_classes
        ends = [v for v in (self.accuracy, self.end("train_accuracy")) if v is not None]
        return len(self.epochs) >= TAIL and max(ends, default=1.0) < guess + 0.1 * (1 - guess)

    @property
    def rate(self) -> float | None:
        """Nats per dimension through the deployed channel (audit), else in the last batches."""
        total, width = self.record.true_rate_nats, self.record.client.wire_floats
        return total / width if total is not None and width else self.end("true_rate")


def turn(case: RunHistory, key: str, to: float | int) -> str:
    """A setting, its value and the value to change it to.

    >>> turn(RunHistory(name="x", config={"lambd": 16.0}, epochs=(), num_classes=2), "lambd", 8.0)
    'lambd 16 → 8'
    """
    return f"{key} {case.setting(key):g} → {float(f'{to:.3g}'):g}"


def scale(case: RunHistory, key: str, factor: float | int) -> str:
    """A setting changed to a multiple of its value."""
    return turn(case, key, factor * case.setting(key))


def either(knobs: Sequence[Value]) -> Value:
    """Several ways to mend a run, of which one is enough."""
    return reduce(lambda first, second: say("or", first=first, second=second), knobs)


def also(parts: Sequence[Value]) -> Value:
    """Several things that hold, or that are to be done together."""
    return reduce(lambda first, second: say("also", first=first, second=second), parts)


def say(key: str, **values: Value) -> Sentence:
    """A sentence of the doctor's, see `[doctor]` in `report/locale/`."""
    return sentence(f"doctor.{key}", **values)


ZERO = 1e-9
SHUT = 0.999
COLLAPSED = 0.5
FEW_PER_CLASS = 4.0
CLOSED_GATE = 0.25
STILL = 0.9  # share of the first spread that still counts as not fallen
Seen = tuple[Value, Value]


def stuck_at_zero(case: RunHistory) -> Seen | None:
    """`rob_loss` is 0 at the end: off, in warm-up, shut again, or below its threshold."""
    if "lambd" not in case.config:
        return None
    if not case.penalised:
        return say("off"), say("off-do")
    if not case.active:
        return _still_warming(case)
    values = case.series("rob_loss")
    if max(values[-TAIL:]) > ZERO:
        return None
    if (case.end("shut") or 0.0) >= SHUT:
        return _shut_again(case)
    return _under_threshold(case)


def _still_warming(case: RunHistory) -> Seen:
    done, planned = len(case.epochs), int(case.setting("epochs", len(case.epochs)))
    warm, first = int(case.setting("attention_warmup_epochs")), first_epoch(case.config)
    seen = say("warming", done=str(done), first=str(first), planned=str(planned))
    if first <= planned:
        return seen, say("warming-resume", first=str(first))
    if planned > 4 * max(warm, 1):
        return seen, say("warming-longer", epochs=str(4 * first))
    longer = f"epochs {planned} → {4 * first}"
    shorter = turn(case, "attention_warmup_epochs", planned // 4)
    return seen, say("or-else", first=shorter, second=longer) if warm else longer


def _shut_again(case: RunHistory) -> Seen | None:
    """The early steps are not over, or the shut-off was open before and closed again."""
    opened = min(case.series("shut")) < SHUT
    if not opened and _active_steps(case) > case.setting("early_shut_steps"):
        return None  # it never opens: the rule of that name speaks
    rule, value, limit = _holding(case)
    if rule == "early_shut_steps":
        return (
            say("early", done=f"{value:.0f}", steps=f"{limit:g}"),
            say("early-do", knob=turn(case, rule, value // 10)),
        )
    return (
        say("shut-again", rule=rule, mean=f"{value:.2f}", limit=f"{limit:g}"),
        say("shut-again-do", knob=turn(case, rule, _above(value))),
    )


def _under_threshold(case: RunHistory) -> Seen | None:
    """Every variance lies below τ = var_threshold·σ²: halve τ below what is left."""
    if case.at_chance:
        return None  # nothing is left to spread; the rule about chance speaks
    values = case.series("rob_loss")
    last = max((i for i, v in enumerate(values) if v > ZERO), default=-1)
    since = f"{number(case.active[last + 1], 'epoch') or 0:.0f}"
    if "var_threshold" not in case.config:
        return say("nothing-left", since=since), say("nothing-left-do")
    old, noise = case.setting("var_threshold"), case.setting("noise_std")
    spread = case.end("intra_mse")
    new = old / 2
    if spread is not None and noise > 0 and case.config.get("form") != "trace":
        new = min(new, spread / (2 * noise**2))
    return (
        say("under-threshold", since=since, threshold=f"{old * noise**2:.3g}",
            spread=f"{spread or 0:.3g}"),
        say("under-threshold-do", knob=turn(case, "var_threshold", new)),
    )  # fmt: skip


def never_opens(case: RunHistory) -> Seen | None:
    """The early shut-off holds in every epoch in which the penalty could have acted."""
    shut = case.series("shut")
    if not shut or min(shut) < SHUT or _active_steps(case) <= case.setting("early_shut_steps"):
        return None
    rule, value, limit = _holding(case)
    return (
        say("never-opens", epochs=str(len(shut)), rule=rule, mean=f"{value:.2f}",
            limit=f"{limit:g}"),
        say("never-opens-do", knob=turn(case, rule, _above(value))),
    )  # fmt: skip


def _active_steps(case: RunHistory) -> float:
    """Steps with a penalty: from the last step before it to the last one logged."""
    first = number(case.active[0], "epoch") or 1.0
    before = [n for line in case.epochs if (number(line, "epoch") or 0.0) < first
              for n in [number(line, "step")] if n is not None]  # fmt: skip
    return (number(case.epochs[-1], "step") or 0.0) - (before[-1] if before else 0.0)


def _holding(case: RunHistory) -> tuple[str, float, float]:
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


def collapsed(case: RunHistory) -> Seen | None:
    """The surrogate reports less than half of the true rate."""
    ratio = case.end("surrogate_to_true")
    if ratio is None or ratio >= COLLAPSED:
        return None
    seen = say("collapsed", share=f"{100 * ratio:.0f}")
    if "clusters" in case.config:
        fewer = max(1, case.setting("clusters") // 2)
        return seen, say("fewer-clusters", knob=turn(case, "clusters", fewer))
    now = str(case.config.get("attention"))
    other = "uniform" if now == "maximise" else "maximise"
    return seen, say("collapsed-do", now=now, other=other)


def uniform_attention(case: RunHistory) -> Seen | None:
    """The weights never left 1/M_c: the attention has learned nothing."""
    sizes = case.series("effective_sample_size")
    acts = _attends(case) and (case.end("rob_loss") or 0.0) > ZERO
    if not acts or len(sizes) < 5 or min(sizes) <= 0.99:  # noqa: PLR2004
        return None
    return (
        say("uniform", size=f"{min(sizes):.3f}"),
        say("uniform-do", knob=_attention_lr(case, 10.0, 1e-3)),
    )


def one_hot_attention(case: RunHistory) -> Seen | None:
    """A class is judged by hardly more than one sample."""
    size = case.end("effective_sample_size")
    limit = max(0.1, 1.5 / max(case.per_class, 1.0))
    if "num_slots" in case.config:
        limit = min(limit, 0.9 / case.setting("num_slots", 1.0))  # hard, equal slots are fine
    if size is None or not _attends(case) or size >= limit:
        return None
    return (
        say("one-hot", size=f"{size:.3f}"),
        say("one-hot-do", knob=_attention_lr(case, 0.1, 1e-4)),
    )


def _attention_lr(case: RunHistory, factor: float, start: float) -> Value:
    """Its own Adam at a rate, or that rate times a factor."""
    if case.setting("attention_lr"):
        return scale(case, "attention_lr", factor)
    return say("own-adam", rate=f"{start:g}")


def _attends(case: RunHistory) -> bool:
    return case.config.get("attention") in ("minimise", "maximise")


def too_few_per_class(case: RunHistory) -> Seen | None:
    """A batch holds too little of a class for a variance, or the class gate is shut by it."""
    if not case.penalised:
        return None
    few = case.per_class < FEW_PER_CLASS and not case.setting("bank")
    a, b, share = case.setting("class_gate_a"), case.setting("class_gate_b"), 1 / case.num_classes
    gate = 1 / (1 + math.exp(min(a * (b - share), 700.0)))
    gated = "class_gate_a" in case.config and case.config.get("penalty") is None
    closed = gated and case.config.get("form", "gated") == "gated" and gate < CLOSED_GATE
    if not few and not closed:
        return None
    seen: list[Value] = [say("few", count=f"{case.per_class:.1f}")] if few else []
    larger = turn(case, "batch_size", 8 * case.num_classes)
    advice: list[Value] = [larger] if few else []
    if few and "bank" in case.config:
        advice = [say("few-bank", batch=larger, bank=turn(case, "bank", 64))]
    if closed:
        seen.append(say("class-gate", share=f"{100 * gate:.0f}", at=f"{share:.3g}"))
        knobs = [scale(case, "class_gate_a", 1 / 4), f"class_gate_b → {share:.3g}"]
        advice.append(either(knobs))
    if few and "num_slots" in case.config and case.config.get("penalty") is None:
        advice.append(say("relax"))
    return also(seen), also(advice)


def still_scattered(case: RunHistory) -> Seen | None:
    """One gated attention per class, and the spread within classes does not fall."""
    values = case.series("intra_mse")
    gated = _attends(case) and "num_slots" not in case.config and "form" in case.config
    if not gated or len(values) < 2 * TAIL or (case.end("rob_loss") or 0.0) <= ZERO:
        return None
    first, last = fmean(values[:TAIL]), fmean(values[-TAIL:])
    if last <= STILL * first:
        return None
    stronger = scale(case, "lambd", 2)
    advice = say("scattered-do", stronger=stronger)
    if case.config.get("penalty") == "rate":
        advice = say("scattered-longer", longer=scale(case, "epochs", 2), stronger=stronger)
    return say("scattered", first=f"{first:.3g}", last=f"{last:.3g}"), advice


LOST = 0.02
HALF_LOG_TWO = 0.5 * math.log(2)  # nats per dimension where signal and noise are equally strong
STEEP = 0.02  # relative fall of the task loss per epoch
LEARNED = 0.02  # task loss under which there is nothing left to learn
BESIDE_RATES = ("adversary_lr", "patrol_lr", "scissors_lr")  # of what learns beside the model
STRENGTHS = ("_strength", "_beta", "dropout", "prune", "noise_std")  # ends of knobs to halve


def accuracy_lost(case: RunHistory) -> Seen | None:
    """Accuracy fell from its best, or lies far below a run without a penalty."""
    now = case.accuracy
    if now is None or case.at_chance:
        return None
    values = case.series("val_accuracy")
    best = max((fmean(values[i : i + TAIL]) for i in range(len(values) - TAIL + 1)), default=0.0)
    said: list[Value] = []
    if best - now > LOST:
        said.append(say("accuracy-fell", best=f"{100 * best:.1f}", now=f"{100 * now:.1f}"))
    could = None if case.plain is None else case.plain.accuracy
    if case.plain and could and could - now > LOST and training_not_converged(case) is None:
        said.append(
            say("accuracy-below", now=f"{100 * now:.1f}", name=case.plain.name,
                could=f"{100 * could:.1f}")
        )  # fmt: skip
    return (also(said), _weaker(case)) if said else None


def _weaker(case: RunHistory) -> Value:
    """Half the weight and a higher threshold, or the defence's own strength."""
    if not case.penalised:
        keys = [key for key in case.config if key.endswith(STRENGTHS) and case.setting(key)]
        knobs = [scale(case, key, 1 / 2) for key in keys]
        knobs += [scale(case, "bits", 2)] if "bits" in case.config else []
        return either(knobs or [scale(case, "lr", 1 / 2)])
    key = "attention_loss_scale" if "attention_loss_scale" in case.config else "lambd"
    advice = scale(case, key, 1 / 2)
    if case.config.get("penalty") == "rate" or "var_threshold" not in case.config:
        steep = case.setting("ramp") < 0.5  # noqa: PLR2004
        return also([advice, turn(case, "ramp", 0.5)]) if steep else advice
    return also([advice, scale(case, "var_threshold", 4)])


def at_chance(case: RunHistory) -> Seen | None:
    """Under a penalty nothing is learned at all."""
    weight = case.end("weight")
    if not case.penalised or not case.active or not case.at_chance:
        return None
    seen = say("chance", accuracy=f"{100 * (case.accuracy or 0):.1f}",
               guess=f"{100 / case.num_classes:.1f}", weight=f"{weight or 0:.3g}")  # fmt: skip
    weaker = scale(case, "lambd", 1 / 10)
    if case.setting("ramp") == 0:
        return seen, say("chance-do", ramp=turn(case, "ramp", 0.5), weaker=weaker)
    return seen, weaker


def penalty_not_finite(case: RunHistory) -> Seen | None:
    """The training skipped a penalty whose loss or gradient was not finite."""
    skipped = max(case.series("skipped"), default=0.0)
    if skipped == 0:
        return None
    steps = number(case.epochs[-1], "step") or skipped
    weaker = [scale(case, "lambd", 1 / 2)] if case.penalised else []
    slower = [scale(case, key, 1 / 10) for key in BESIDE_RATES if key in case.config]
    knobs = either([*weaker, scale(case, "lr", 1 / 2), *slower])
    return (
        say("not-finite", skipped=f"{skipped:.0f}", steps=f"{steps:.0f}"),
        say("not-finite-do", knobs=knobs),
    )


def noise_too_small(case: RunHistory) -> Seen | None:
    """More signal than noise on the wire, in nats per dimension."""
    noise = case.setting("noise_std")
    if "noise_std" not in case.config or (noise == 0 and not case.penalised):
        return None
    if noise == 0:
        return say("no-noise"), turn(case, "noise_std", 0.05)
    rate = case.rate
    if rate is None or round(rate, 2) <= round(HALF_LOG_TWO, 2):  # as it is printed
        return None
    factor = math.sqrt(math.expm1(2 * min(rate, 20.0)))
    knobs = [scale(case, "noise_std", factor)]
    if case.penalised:
        knobs.append(scale(case, "lambd", 2))
    return say("little-noise", rate=f"{rate:.2f}", limit=f"{HALF_LOG_TWO:.2f}"), either(knobs)


def training_not_converged(case: RunHistory) -> Seen | None:
    """The run was stopped, or its loss was still falling when it ended."""
    done = int(number(case.epochs[-1], "epoch") or len(case.epochs))
    planned = int(case.setting("epochs", done))
    if done < planned:
        return say("stopped", done=str(done), planned=str(planned)), say("stopped-do")
    losses = case.series("task_loss")
    if len(losses) < TAIL + 1:
        return say("too-short", epochs=str(len(losses))), f"epochs {planned} → {10 * planned}"
    if case.at_chance and case.penalised:
        return None
    fall, last = fall_per_epoch(losses), fmean(losses[-max(1, len(losses) // 10) :])
    if last <= LEARNED or fall <= STEEP:
        return None
    again = f"epochs {planned} → {math.ceil(1.5 * planned)}"
    return (
        say("still-falling", share=f"{100 * fall:.0f}", last=f"{last:.3g}"),
        say("still-falling-do", knob=again),
    )


def alone_suffices(case: RunHistory) -> Seen | None:
    """A client alone, or a linear head on the device, answers as well as the server."""
    found = [flag for flag in case.beside.flags or () if flag.name == "server not needed"]
    if not found:
        return None
    best = gains(Group("", ((case.record,),)), case.rows).best
    if best is None:
        return found[0].seen or NOTHING, say("alone-train")
    found_in = best.runs[0] if best.runs else case.files  # without one it is this run's own head
    if found_in is None:
        return found[0].seen or NOTHING, say("alone-train")
    path, own = str(found_in.path), sends_part(found_in.record)
    train = say("alone-own", path=path) if own else say("alone-do", path=path)
    return found[0].seen or NOTHING, train


def sends_what_it_is_sure_of(case: RunHistory) -> Seen | None:
    """An early exit beside it answers as well, with a sure gain, and exposes less."""
    own = Group("", ((case.record,),))
    mine, exposed = case.record.accuracy, exposure_over(own)
    if mine is None or exposed is None or case.record.sent == 0 or sends_part(case.record):
        return None
    for row in case.rows:
        theirs, limits, made = row.mean("accuracy"), exposure_over(row), gains(row, case.rows)
        if images_of(row) != images_of(own) or not all(map(sends_part, row.records)):
            continue
        sure = made.over_best is not None and made.over_best.sure
        if theirs is None or limits is None or not sure or theirs < mine - NOT_NEEDED:
            continue
        if (limits[1] or (limits[0],) * 2)[1] >= exposed[0]:
            continue
        first = row.records[0]
        return (
            say("sends-all", name=row.name, sent=percent(row.mean("sent"), 0),
                theirs=percent(theirs, 1), own=percent(mine, 1), part=percent(limits[0], 0),
                all=percent(exposed[0], 0)),
            say("sends-all-do", defence=str(first.config.get("defence")),
                send=str(first.config.get("send"))),
        )  # fmt: skip
    return None


RULES: Mapping[str, Callable[[RunHistory], Seen | None]] = {
    "run not converged": training_not_converged,
    "accuracy at chance": at_chance,
    "accuracy lost": accuracy_lost,
    "rob_loss stuck at 0": stuck_at_zero,
    "shut-off never opens": never_opens,
    "too few per class": too_few_per_class,
    "values not finite": penalty_not_finite,
    "estimator collapsed": collapsed,
    "attention uniform": uniform_attention,
    "attention one-hot": one_hot_attention,
    "classes still scattered": still_scattered,
    "noise too small": noise_too_small,
    "server not needed": alone_suffices,
    "sends what it is sure of": sends_what_it_is_sure_of,
}


def diagnose(case: RunHistory, lang: Lang = "en") -> list[Diagnosis]:
    """What is wrong with a run, in the order in which to change it; empty for a healthy run."""
    looked = ((name, rule(case)) for name, rule in RULES.items() if case.epochs)
    return [
        Diagnosis(
            name=name,
            seen=translated(written(found[0], lang), lang),
            advice=written(found[1], lang),
        )
        for name, found in looked
        if found
    ]


SAME = ("dataset", "net", "split_seed")
PLAIN = ("none", "noise")  # defences without a penalty, the plainest first


def read_case(folder: Path, plain: Path | None = None, *, begun: bool = False) -> RunHistory:
    """Read a run for the doctor.

    Args:
        folder: The run.
        plain: A run without a penalty to compare its accuracy with. None takes one from the folder
            above that has the same data and net, and no defence or only noise.
        begun: Whether a run without a finished epoch will do.

    Raises:
        RunError: The run has no finished epoch, or `plain` no accuracy.
    """
    case = replace(_read(folder, begun=begun), rows=_rows_beside(folder))
    if plain is None:
        return replace(case, plain=_neighbour(folder, case.config))
    other = _read(plain)
    if other.accuracy is None:
        raise RunError(f"{plain} has no accuracy to compare with; train or audit it first")
    return replace(case, plain=other)


def _read(folder: Path, *, begun: bool = False) -> RunHistory:
    from splitveil.config.resolve import flat_config, read_folder

    files = read_run(folder, audited=False)
    config, built = read_folder(folder)
    if not (files.metrics or begun):
        raise RunError(
            f"run '{files.name}' has no finished epoch in metrics.jsonl; train it, or continue it "
            "with --resume"
        )
    return RunHistory(name=files.name, config=flat_config(config), epochs=files.metrics,
                      num_classes=built.num_classes, record=files.record, files=files)  # fmt: skip


def _rows_beside(folder: Path) -> tuple[Group, ...]:
    """The other audited runs in the folder above; those that cannot be read are skipped."""
    runs = []
    for path in sorted(folder.resolve().parent.glob("*/record.json")):
        with suppress(SplitVeilError):
            if path.parent != folder.resolve():
                runs.append(read_run(path.parent))
    return tuple(kinds(runs))


def _neighbour(folder: Path, config: Json) -> RunHistory | None:
    """The plainest comparable run in the folder above; runs that cannot be read are skipped."""
    if config.get("defence") in PLAIN:
        return None
    found: dict[str, RunHistory] = {}
    for path in sorted(folder.resolve().parent.glob("*/config.toml")):
        with suppress(SplitVeilError):
            other = read_toml(path)
            alike = all(other.get(key) == config[key] for key in SAME)
            if alike and other.get("defence") in PLAIN:
                run = _read(path.parent)
                if run.accuracy is not None:
                    found.setdefault(other["defence"], run)
    return next((found[defence] for defence in PLAIN if defence in found), None)
