"""How long an epoch takes with each preset, compared with `none`: whole trainings in a row.

python benchmarks/epoch_time.py OUT.json [--net vgg11] [--images 25600] [--batch 512]
                                [--device cuda] [--compile] [--presets none veil ...]

Random images in CIFAR-10's shape, with its augmentation. A preset is trained for three epochs,
without its warm-up; the last one is measured, when its penalty is on and every kernel has been
captured, and is scaled to 50,000 images. What comes once per epoch (a refit, a line in the log) is
inside.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from splitveil.config.resolve import make_config, resolve
from splitveil.data.dataset import Dataset
from splitveil.data.splits import make_splits
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.io import silent
from splitveil.provenance import device_name, versions
from splitveil.train.loop import train_run

CLASSES, TESTED, TOLD = 10, 1000, 50_000
STACKS = ("arl+cem", "arl+veil")


def made_up(images: int) -> Dataset:
    """Random images, of which the last thousand are for testing."""
    generator = torch.Generator().manual_seed(0)
    n = images + TESTED
    return Dataset(
        name="random",
        images=torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator),
        labels=torch.arange(n) % CLASSES,
        classes=tuple(map(str, range(CLASSES))),
        pool=torch.arange(images),
        test=torch.arange(images, n),
        crop_pad=4,
        flip=True,
    )


def last_epoch_ms(defence: str, dataset: Dataset, options: argparse.Namespace) -> float:
    """Milliseconds of the third epoch of a training, scaled to 50,000 images."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"dataset": "cifar10", "defence": defence, "net": options.net, "epochs": 3,
                  "batch_size": options.batch, "device": options.device, "final": True,
                  "compile": options.compile, "runs_dir": folder, "name": "run"}  # fmt: skip
        if "attention_warmup_epochs" in find_defence(defence).setting_types():
            wanted["attention_warmup_epochs"] = 0
        plan = resolve(make_config(wanted), dataset)
        plan.config.folder.mkdir()
        parts = plan.build()
        train_run(plan, parts, dataset, make_splits(dataset, final=True), silent, passport={})
        text = (plan.config.folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    if parts.surrogate is not None and not epochs[2].get("weight"):
        raise SystemExit(f"{defence}: its penalty was not on in the epoch that was measured")
    ends = [float(line["seconds"]) for line in epochs]
    steps = len(dataset.pool) // options.batch
    return float(1000 * (ends[2] - ends[1]) * TOLD / (steps * options.batch))


def main() -> None:
    """Measure, print, write; after each preset, so that a failure loses only the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="vgg11")
    parser.add_argument("--images", type=int, default=25_600)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--presets", nargs="+", default=[*DEFENCES, *STACKS])
    options = parser.parse_args()
    dataset = made_up(options.images)
    rows: list[dict[str, object]] = []
    plain = last_epoch_ms("none", dataset, options)
    for preset in options.presets:
        ms = plain if preset == "none" else last_epoch_ms(preset, dataset, options)
        rows.append({"preset": preset, "best_ms": ms, "ratio": ms / plain, "repeats": 1,
                     "images_per_second": round(1000 * TOLD / ms)})  # fmt: skip
        print(f"{preset:>18} {ms:9.1f} ms per epoch  ×{ms / plain:.3f}", flush=True)
        found = {"suite": "epoch", "net": options.net, "batch": options.batch,
                 "compiled": options.compile, "versions": versions(), "rows": rows,
                 "device": device_name(torch.device(options.device)),
                 "ratios": {str(r["preset"]): r["ratio"] for r in rows}}  # fmt: skip
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
