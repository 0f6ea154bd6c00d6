"""A run folder as a case, with the plain run beside it where there is one."""

from pathlib import Path

from splitveil.config.settings import read_toml
from splitveil.doctor.case import Case, Plain
from splitveil.errors import RunError, SplitVeilError
from splitveil.report.files import read_run
from splitveil.threat import Json

SAME = ("dataset", "net", "split_seed")


PLAIN = ("none", "noise")  # defences without a penalty, the plainest first


def read_case(folder: Path, plain: Path | None = None) -> Case:
    """The run at `folder`; `plain` is the run to compare with.

    Without one, a run beside it is taken that has the same data and net and no defence but noise.
    """
    case = _read(folder)
    if plain is not None:
        found: Plain | None = _as_plain(_read(plain))
        if found is None:
            raise RunError(f"{plain} has no accuracy to compare with; train or audit it first")
    else:
        found = _neighbour(folder, case.config)
    return Case(**(vars(case) | {"plain": found}))


def _read(folder: Path) -> Case:
    from splitveil.config.resolve import flat_config
    from splitveil.runs import read_folder

    files = read_run(folder, audited=False)
    config, built = read_folder(folder)
    if not files.metrics:
        raise RunError(
            f"run '{files.name}' has no finished epoch in metrics.jsonl; train it, or continue it "
            "with --resume"
        )
    return Case(
        name=files.name,
        config=flat_config(config),
        epochs=files.metrics,
        num_classes=built.num_classes,
        record=files.record,
    )


def _as_plain(case: Case) -> Plain | None:
    return None if case.accuracy is None else Plain(name=case.name, accuracy=case.accuracy)


def _neighbour(folder: Path, config: Json) -> Plain | None:
    """The plainest run of the same folder that can be compared; broken ones are passed over."""
    if config.get("defence") in PLAIN:
        return None
    best: tuple[int, Plain] | None = None
    for path in sorted(folder.resolve().parent.glob("*/config.toml")):
        try:
            other = read_toml(path)
            if other.get("defence") not in PLAIN or any(other.get(k) != config[k] for k in SAME):
                continue
            found = _as_plain(_read(path.parent))
        except SplitVeilError:
            continue
        rank = PLAIN.index(other["defence"])
        if found is not None and (best is None or rank < best[0]):
            best = rank, found
    return None if best is None else best[1]
