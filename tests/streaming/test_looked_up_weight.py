"""An embedding's weight that reads its rows from the files."""

import torch

from lightning_obs.streaming.looked_up_weight import LookedUpWeight


def test_rows_are_selected_by_position_or_by_keyword():
    whole = torch.arange(12.0).view(4, 3)
    weight = LookedUpWeight.of(torch.empty(4, 3, device="meta"), torch.device("cpu"), lambda number=None: whole)
    rows = torch.tensor([2, 0])
    assert torch.equal(weight.index_select(0, rows), whole[rows])
    assert torch.equal(weight.index_select(dim=0, index=rows), whole[rows])
