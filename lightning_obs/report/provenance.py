"""Where a report comes from: what somebody needs to make it again who has only the page."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

from lightning_obs.calibration.options import CalibrationOptions
from lightning_obs.calibration.result import CalibrationResult
from lightning_obs.report.next_steps import call_text

#: packages on whose versions the numbers of a report depend
_PACKAGES = ("lightning-obs", "torch", "lightning", "pytorch-lightning", "transformers", "compressed-tensors")


def provenance(options: CalibrationOptions | None, result: CalibrationResult | None) -> dict[str, str]:
    """The facts that a run knows of itself, by label: date, options, data, seed, versions and commit.

    :func:`~lightning_obs.report.page.write_report` asks for them; a caller's own facts replace those of the same label.

    Args:
        options: of the calibration; None: there was none.
        result: of the calibration, whose batches are counted; None: there was none.
    """
    finished_at = datetime.now(timezone.utc)
    facts = {"date": finished_at.strftime("%Y-%m-%d %H:%M UTC")}
    if options is not None:
        facts["options"] = call_text("CalibrationOptions", options, {})
    if result is not None and result.batches:
        facts["data"] = f"{result.batches} batches"
    facts["seed"] = os.environ.get("PL_GLOBAL_SEED", "none was set by seed_everything")
    facts["versions"] = _versions()
    commit = _commit()
    if commit:
        facts["commit"] = commit
    return facts


def _versions() -> str:
    """Python and the packages, each with its version; a package that is not installed is left out."""
    texts = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            texts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(texts)


def _commit() -> str:
    """The commit of the folder in which the run was started; empty outside of a repository, or without git."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return ""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit} and changes that are in no commit" if changes else commit


def _git(*arguments: str) -> str:
    """What a command of git prints; empty if it fails."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
