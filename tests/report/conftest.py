import time

import pytest

from lightning_obs.report.page import write_report
from tests.report.pages import made_up


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The files of 210 layers."""
    folder = tmp_path_factory.mktemp("page")
    started = time.process_time()
    write_report(folder, made_up(210))
    assert time.process_time() - started < 5
    return folder
