"""docs/evidence/lightning_docs.md: the example that it proposes for Lightning's docs runs."""

import pytest

from tests.support.lightning_package import under_the_chosen_name
from tests.support.markdown import blocks, page


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
def test_the_example_runs_and_ships_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page("docs/evidence/lightning_docs.md"), "python")
    known = {}
    exec(compile(under_the_chosen_name(code), "docs/evidence/lightning_docs.md", "exec"), known)
    assert {"val_loss", "val_loss_quantized"} <= known["trainer"].callback_metrics.keys()
    assert (tmp_path / "classifier-int8" / "config.json").is_file()
