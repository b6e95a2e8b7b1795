"""Pictures of a run's page for the docs, by headless Chromium: a desktop and a phone, light and dark.

    python -m lightning_obs scheme=int8_static export=none data.batches=4 data.eval_batches=4 \
        output_dir=outputs/pictures
    python benchmarks/docs/report_pictures.py outputs/pictures docs/pictures

A picture shows a window without scrolling; in those of a layer the worst one is open. Chromium is the system's package
`chromium`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from urllib.parse import quote

from PIL import Image  # comes with tensorboard

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.report.browser import CHROMIUM, Browser

#: name -> width and height of the window, whether dark, what it begins with; {} is the name of the worst layer
PICTURES = {
    "report-desktop-light": (1300, 900, False, ""),
    "report-desktop-dark": (1300, 900, True, ""),
    "report-layer-light": (1300, 900, False, "#layer={}"),
    "report-phone-light": (390, 1100, False, ""),
}


def main() -> int:
    """Write the pictures of one page; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with report.html and report.json")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("no Chromium: install the system's package `chromium`", file=sys.stderr)
        return 1
    worst = quote(json.loads((options.run / "report.json").read_text())["layers"][0]["name"])
    options.out.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for name, (width, height, dark, fragment) in PICTURES.items():
            browser.open(options.run / "report.html", width, height, dark, fragment.format(worst))
            if fragment:
                browser.run("document.getElementById('map').scrollIntoView()")
            file = options.out / f"{name}.png"
            browser.picture(file)
            with Image.open(file) as whole:  # no colour of the map moves by more than 6 of 255
                few = whole.convert("RGB").quantize(
                    256, method=Image.Quantize.MAXCOVERAGE, kmeans=10, dither=Image.Dither.NONE
                )
            few.save(file, optimize=True)
            print(file, f"{file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
