"""The tensors of a checkpoint under the names of its files.

A plain module's names are those of its state dict. transformers stores a tied weight once, and takes back the
conversions with which it loads an architecture: most of them rename, some stack or split tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_obs.files.tensors import TensorWriter
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.weight import identities


@dataclass
class StoredNames:
    """What a model's entries are in its checkpoint.

    Attributes:
        model: whose entries they are.
        entries: the entries that are stored, as meta tensors by their names in the state dict.
        files: the tensors of the files, as meta tensors by their names there.
        renamed: the name in the files of each entry that is stored as it is; the others are converted.
    """

    model: nn.Module
    entries: Mapping[str, torch.Tensor]
    files: Mapping[str, torch.Tensor] = field(init=False)
    renamed: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        if is_transformers_model(self.model):
            self.entries = _without_tied(self.model, self.entries)
        self.files = self._converted(dict(self.entries))
        names = {id(tensor): name for name, tensor in self.files.items()}
        self.renamed = {name: names[id(tensor)] for name, tensor in self.entries.items() if id(tensor) in names}
        #: blocks of rows of the entries that are to be converted
        self._unconverted: dict[str, list[torch.Tensor]] = {}

    def put(self, writer: TensorWriter, name: str, rows: torch.Tensor, first: int, copy: bool) -> None:
        """Write rows of an entry; ``copy``: they are not there any more after the call."""
        if name in self.renamed:
            writer.write(self.renamed[name], rows, first)
        else:
            self._unconverted.setdefault(name, []).append(rows.detach().to("cpu", copy=copy))

    def finish(self, writer: TensorWriter) -> None:
        """Write the entries that have to be converted, all of which have been put."""
        whole = {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in self._unconverted.items()}
        self._unconverted = {}
        for name, tensor in self._converted(whole).items():
            writer.write(name, tensor)

    def _converted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not is_transformers_model(self.model):
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, torch.Tensor] = revert_weight_conversion(self.model, tensors)
        return found


def _without_tied(model: Any, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that transformers saves."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    own = identities(model)
    # transformers compares addresses, which meta tensors do not have.
    stand_ins = {one: torch.empty(1) for one in own.values()}
    tied = {name: stand_ins[one] for name, one in own.items() if name in entries}
    left_out = set(model._keys_to_ignore_on_save or ())
    kept = remove_tied_weights_from_state_dict({name: tied.get(name, torch.empty(1)) for name in entries}, model)
    return {name: tensor for name, tensor in entries.items() if name in kept and name not in left_out}
