"""How much of what calibration loses does fine-tuning bring back? The recipes of configs/experiment, measured.

    python benchmarks/accuracy/qat_recovery.py [--scheme w4a16] [--scheme w4a8] [--control] [overrides]

Runs ``python -m lightning_obs experiment=qat_<scheme>`` for each and prints one Markdown table: perplexity on text that
was not trained on, in full precision, calibrated only, fine-tuned, and of the checkpoint loaded again. About 12 minutes
a row on one core, half of them training. What a run says goes to stderr.

The text measured on is of the kind trained on, so a part of what comes back is the model learning that kind: more than
100 % is possible. ``--control`` adds a row for the same training in full precision, calibrated afterwards.

Exit code 1 if a recipe brings back less than half of what calibration lost, if the reloaded checkpoint has another
perplexity than the fine-tuned model, or if fine-tuning takes more than ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCHEMES = ("w4a16", "w4a8", "nvfp4")
SCALES = ("nvfp4_scales",)  # scales alone: from a better calibration, so with less to bring back
MINUTES = 10.0
NEVER = "+task.callback.start_step=1000000"  # nothing is quantized before this step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--scheme", action="append", choices=(*SCHEMES, *SCALES), help="one of the recipes; default: those of weights"
    )
    parser.add_argument("--control", action="store_true", help="also train in full precision, and calibrate then")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run, e.g. model.path=<folder>")
    options = parser.parse_intermixed_args()
    wrong = []
    print("| experiment | full precision | calibrated only | fine-tuned | reloaded | recovered | minutes |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for scheme in options.scheme or SCHEMES:
        report = run(f"experiment=qat_{scheme}", *options.overrides)
        print(row(f"`qat_{scheme}`", report), flush=True)
        wrong += [f"qat_{scheme}: {what}" for what in shortcomings(report)]
        if options.control:
            report = run(f"experiment=qat_{scheme}", NEVER, *options.overrides)
            print(row(f"`qat_{scheme}`, trained in full precision", report), flush=True)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def run(*overrides: str) -> dict[str, Any]:
    """The report.json of one run of the application."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_obs", "trainer.enable_progress_bar=false", *overrides]
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, stdout=sys.stderr)
        return json.loads((Path(folder) / "report.json").read_text())


def row(name: str, report: dict[str, Any]) -> str:
    """A line of the table."""
    full, tuned = report["perplexity"]
    figures = (full, report["perplexity_calibrated"], tuned, report.get("perplexity_reloaded"))
    shown = " | ".join("" if figure is None else f"{figure:.3f}" for figure in figures)
    recovered = "nothing lost" if report["recovered"] is None else f"{report['recovered']:.0%}"
    return f"| {name} | {shown} | {recovered} | {report['seconds_trained'] / 60:.1f} |"


def shortcomings(report: dict[str, Any]) -> list[str]:
    """What a recipe does not keep of its promises."""
    found = []
    if report["recovered"] is not None and report["recovered"] < 0.5:
        found.append(f"brought back {report['recovered']:.0%}, less than half")
    if report.get("perplexity_reloaded") != report["perplexity"][1]:
        found.append("the reloaded checkpoint has another perplexity")
    if report["seconds_trained"] > MINUTES * 60:
        found.append(f"fine-tuning took {report['seconds_trained'] / 60:.1f} minutes")
    return found


if __name__ == "__main__":
    sys.exit(main())
