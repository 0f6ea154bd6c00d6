"""The three runs of the first five minutes."""

from pathlib import Path

from splitveil.attacks.profiles import find_profile
from splitveil.config.resolve import make_config
from splitveil.experiments.runner import LiveTable, Trial, Work, run_many

DEFENCES = ("none", "gated-att", "veil")


def run_demo(
    runs_dir: str, profile: str, epochs: int | None = None, progress: LiveTable | None = None
) -> list[Path]:
    """Train and audit an undefended run and two defended ones on digits, anew each time.

    Args:
        runs_dir: Folder that gets a run for each defence.
        profile: Budget of the attacks.
        epochs: Passes over the data; None: 60.
        progress: The table that shows what happens.

    Returns:
        The runs' folders.
    """
    find_profile(profile)  # a typing error must not cost a training
    common = {"dataset": "digits", "runs_dir": runs_dir, "epochs": epochs}
    configs = [make_config({**common, "defence": name, "name": name}) for name in DEFENCES]
    trials = [Trial(label=config.defence, config=config) for config in configs]
    work = Work(profile=profile, resume=False, keep_going=False)
    return [trial.config.folder for trial in run_many(trials, work, progress=progress)]
