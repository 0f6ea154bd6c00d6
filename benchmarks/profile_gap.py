"""How far one audit profile is from another, on three validation clients, and what each costs.

python benchmarks/profile_gap.py OUT.json [--profiles laptop standard] [--attacks decoder]

Three clients of one net are trained: without a defence, with noise, with `veil`. Each is audited on
validation images by every profile. `--attacks` leaves out all other attacks.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import splitveil as sv
from splitveil.provenance import device_name, versions

NOISE = {"none": None, "noise": 0.1, "veil": None}  # None: the default of the dataset


def main() -> None:
    """Train, audit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profiles", nargs="+", default=["laptop", "standard"])
    parser.add_argument("--attacks", nargs="*", default=[])
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--net", default="auto")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--data-dir")
    parser.add_argument("--runs-dir", help="keep the runs there, and use those that are there")
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as scratch:
        place = Path(options.runs_dir or scratch)
        for defence, noise in NOISE.items():
            name = f"{options.dataset}-{defence}"
            if (place / name / "checkpoint.safetensors").is_file():
                run = sv.load_run(place / name)
            else:
                config = sv.RunConfig(
                    dataset=options.dataset, defence=defence, net=options.net, name=name,
                    runs_dir=str(place), epochs=options.epochs, device=options.device,
                    precision=options.precision, data_dir=options.data_dir, noise_std=noise,
                )  # fmt: skip
                run = sv.fit(config, overwrite=True)
            for profile in options.profiles:
                record = run.audit(
                    profile, aux="val", only=options.attacks, fresh=True,
                    precision=options.precision,
                )  # fmt: skip
                rows.append(
                    {"client": defence, "profile": profile, "mse": record.strongest.mse,
                     "by": record.strongest.mse_by, "seconds": record.seconds["audit"],
                     "precision": record.audit.precision,
                     "attacks": {n: {"mse": a.mse, "seconds": a.seconds}
                                 for n, a in record.attacks.items()}}
                )  # fmt: skip
                best = f"MSE {record.strongest.mse:.5f} by {record.strongest.mse_by}"
                print(f"{defence:>6} {profile:>9} {best}, {record.seconds['audit']} s", flush=True)
    device = torch.device(
        "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    )
    found = {"suite": "profiles", "dataset": options.dataset, "epochs": options.epochs,
             "attacks": options.attacks, "device": device_name(device), "versions": versions(),
             "rows": rows}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
