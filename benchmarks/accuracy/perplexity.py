"""Perplexity of the default model, quantized, on text that was not calibrated on.

    python benchmarks/accuracy/perplexity.py

Runs the application once per row and prints one Markdown table. The fourth row leaves out the layers that the report of
the second run names (``ignore_from``). About 75 s a row on two cores. The model's weights lie on a 4-bit lattice, so
4 bits are measured on another (``benchmarks/accuracy/accuracy.py``).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("overrides", nargs="*", help="Hydra overrides for every row, e.g. data.eval_batches=4")
options = parser.parse_args()


def run(folder: Path, *overrides: str) -> dict:
    command = [sys.executable, "-m", "lightning_obs", "trainer.enable_progress_bar=false", "export=none"]
    subprocess.run(
        [*command, *overrides, f"hydra.run.dir={folder}", *options.overrides], check=True, stdout=subprocess.DEVNULL
    )
    return json.loads((folder / "report.json").read_text())


with tempfile.TemporaryDirectory() as scratch:
    int8_report = Path(scratch) / "int8" / "report.json"
    rows = [
        ("`scheme=fp8`", "FP8", run(Path(scratch) / "fp8", "scheme=fp8")),
        ("`scheme=int8_static`", "static INT8", run(int8_report.parent, "scheme=int8_static")),
        (
            "`scheme=int8_static smooth=true`",
            "static INT8, outliers of inputs moved into weights",
            run(Path(scratch) / "smooth", "scheme=int8_static", "smooth=true"),
        ),
        (
            "`scheme=int8_static ignore_from=report.json`",
            "static INT8, without the layers that the run before names",
            run(Path(scratch) / "int8_ignore", "scheme=int8_static", f"ignore_from={int8_report}"),
        ),
        (
            "`scheme=int8_static_asym`",
            "static INT8, inputs with a zero point, ranges of least error",
            run(Path(scratch) / "asym", "scheme=int8_static_asym"),
        ),
        (
            "`experiment=int8_down_proj`",
            "static INT8, without any down_proj",
            run(Path(scratch) / "down_proj", "experiment=int8_down_proj"),
        ),
    ]

    print("| run | what | quantized layers | full precision | quantized | change |")
    print("|---|---|---|---|---|---|")
    for run_name, what, report in rows:
        before, after = report["perplexity"]
        change = 100 * (after / before - 1)
        print(f"| {run_name} | {what} | {len(report['layers'])} | {before:.2f} | {after:.2f} | {change:+.1f} % |")

    print("\nLayers below 15 dB in the static INT8 run, and fused with them:")
    errors = {layer["name"]: layer for layer in rows[1][2]["layers"]}
    print("\n| layer | SQNR [dB] | input range |")
    print("|---|---|---|")
    for name in rows[1][2]["ignore"]:
        if name in errors:
            layer = errors[name]
            print(f"| {name} | {layer['sqnr']:.1f} | [{layer['input_low']:.4g}, {layer['input_high']:.4g}] |")
