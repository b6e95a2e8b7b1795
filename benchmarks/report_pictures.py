"""Pictures of a run's page for the docs, by headless Chromium: a desktop and a phone, light and dark.

    python -m lightning_obs scheme=int8_static observer=histogram export=none data.batches=4 data.eval_batches=4 \
        output_dir=outputs/pictures
    python benchmarks/report_pictures.py outputs/pictures docs/pictures

The layer that loses most is open on the phone. Chromium is the system's package `chromium`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

#: name -> width and height of the page, whether dark, whether the worst layer is open
PICTURES = {
    "report-desktop-light": (1280, 900, False, False),
    "report-desktop-dark": (1280, 900, True, True),
    "report-phone-light": (390, 1100, False, True),
    "report-phone-dark": (390, 1100, True, False),
}


def main() -> int:
    """Write the pictures of one page; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with report.html and report.json")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium: install the system's package `chromium`", file=sys.stderr)
        return 1
    page, layers = options.run / "report.html", json.loads((options.run / "report.json").read_text())["layers"]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (width, height, dark, is_open) in PICTURES.items():
        address = page.resolve().as_uri() + (f"#layer={quote(layers[0]['name'])}" if is_open else "")
        take(browser, address, options.out / f"{name}.png", width, height, dark)
        print(options.out / f"{name}.png")
    return 0


def take(browser: str, address: str, picture: Path, width: int, height: int, dark: bool) -> None:
    """One picture. A window is at least 500 wide; a frame in it can be as narrow as a phone."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{address}" style="width:{width}px;height:{height}px;border:0">'
        )
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--allow-file-access-from-files", f"--user-data-dir={folder}/profile"]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        window = max(width, 500)
        command += [
            f"--window-size={window},{height}",
            "--virtual-time-budget=5000",
            f"--screenshot={picture.resolve()}",
        ]
        subprocess.run([*command, frame.as_uri()], check=True, capture_output=True, timeout=120)
    if window > width:
        from PIL import Image  # comes with matplotlib

        with Image.open(picture) as whole:
            part = whole.crop((0, 0, width, height))
        part.save(picture)


if __name__ == "__main__":
    sys.exit(main())
