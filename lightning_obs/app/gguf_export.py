"""Write the GGUF file of a run that sets ``export.file`` (``export=gguf``), for the tasks that calibrate."""

from __future__ import annotations

from pathlib import Path

from lightning_obs.app.console import step
from lightning_obs.app.job import Job
from lightning_obs.errors import CalibrationError
from lightning_obs.gguf.gguf_file import check_files, require_gguf
from lightning_obs.report.numbers import human_size


def check_gguf_files(job: Job) -> None:
    """Refuse files that could not be written or read; called before the model is loaded.

    Raises:
        CalibrationError: ``export.base`` is missing or no GGUF file, or ``export.file`` is there.
    """
    if job.gguf_file is not None:
        check_files(job.gguf_file, _base(job), job.config.export.overwrite)


def check_gguf(job: Job) -> None:
    """Refuse a GGUF file that could not be written of this model in the end; called before it runs on data.

    Raises:
        CalibrationError: :func:`~lightning_obs.export_gguf` would refuse the base or the scheme. A task that chooses
            schemes has none yet.
    """
    if job.gguf_file is None:
        return
    session = job.callback.session
    schemes = {}
    if session is not None:
        schemes = {target.name: target.scheme for target in session.plan.targets}
    require_gguf(job.model, schemes, job.gguf_file, _base(job), overwrite=job.config.export.overwrite)


def write_gguf(job: Job) -> list[str]:
    """Write the file at the end of a run. Every rank calls this, and rank 0 writes.

    Returns:
        A line for the closing report.
    """
    assert job.gguf_file is not None
    with step("writing the GGUF file"):
        file = job.callback.export_gguf(job.gguf_file, _base(job), overwrite=job.config.export.overwrite)
    if not job.trainer.is_global_zero:
        return []
    return [f"wrote {file}  (llama.cpp; {human_size(file.stat().st_size)})"]


def _base(job: Job) -> Path:
    """The base that the user names.

    Raises:
        CalibrationError: there is none.
    """
    base = job.config.export.base
    if base is None:
        raise CalibrationError(
            "export=gguf needs a GGUF file of the same model in float, whose weights it replaces",
            where=["export.base"],
            got="none",
            remedy="python convert_hf_to_gguf.py <the model's folder> --outtype f16 --outfile model-f16.gguf (of "
            "llama.cpp); then export.base=model-f16.gguf.",
        )
    return Path(base)
