"""The tensors of a checkpoint by their names in its files, which for models of transformers are not the state dict's.

transformers stores a tied weight once. When it loads an architecture it may rename, stack or split the tensors of the
files, and its own function takes these conversions back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_obs.checkpoint.compress import Tensors
from lightning_obs.checkpoint.entries import stored_layout
from lightning_obs.files.tensors import TensorWriter
from lightning_obs.model.kinds import is_transformers_model
from lightning_obs.model.weight import identities


class StoredTensors:
    """The tensors of a model's checkpoint, under both names, and a writer of them under their names in the files.

    Args:
        model: a calibrated model, or a model without qparams. No data are read.

    Attributes:
        entries: a meta tensor of each stored tensor, by its name in the state dict.
        files: the same by the names in the files, after conversion.
        renamed: by name in the state dict, the name in the files of each tensor that is not stacked or split.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.entries = stored_layout(model)
        if is_transformers_model(model):
            self.entries = _without_unsaved(model, self.entries)
        self.files = self._converted(self.entries)
        name_in_files = {id(meta): name for name, meta in self.files.items()}
        self.renamed: dict[str, str] = {}
        for name, meta in self.entries.items():
            if id(meta) in name_in_files:
                self.renamed[name] = name_in_files[id(meta)]
        #: blocks of rows of the tensors that :meth:`finish` will convert
        self._to_convert: dict[str, list[torch.Tensor]] = {}

    def put(self, writer: TensorWriter, name: str, rows: torch.Tensor, first: int, copy: bool) -> None:
        """Write rows of a tensor, or keep them for :meth:`finish` if they have to be converted.

        Args:
            writer: of the files.
            name: the tensor's name in the state dict.
            rows: from ``first`` on; blocks of a tensor come in order.
            first: the number of the first row.
            copy: whether the memory of ``rows`` is used for something else after the call.
        """
        if name in self.renamed:
            writer.write(self.renamed[name], rows, first)
        else:
            self._to_convert.setdefault(name, []).append(rows.detach().to("cpu", copy=copy))

    def finish(self, writer: TensorWriter) -> None:
        """Convert and write the tensors that :meth:`put` kept. Raises a CalibrationError if files lack tensors."""
        whole = {}
        for name, blocks in self._to_convert.items():
            whole[name] = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        self._to_convert = {}
        for name, tensor in self._converted(whole).items():
            writer.write(name, tensor)
        writer.require_complete()

    def _converted(self, tensors: Tensors) -> Tensors:
        """Tensors by their names in the files, as transformers saves them."""
        if not is_transformers_model(self._model):
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, dict(tensors)))


def _without_unsaved(model: Any, entries: Mapping[str, torch.Tensor]) -> Tensors:
    """The entries that transformers saves: each tied tensor once, without the tensors that its class leaves out."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # transformers recognizes tied tensors by their addresses, which meta tensors do not have.
    tensor_of_identity: dict[Any, torch.Tensor] = {}
    identity_of_name = identities(model)
    stand_ins = {}
    for name in entries:
        stand_in = torch.empty(1)
        if name in identity_of_name:
            stand_in = tensor_of_identity.setdefault(identity_of_name[name], stand_in)
        stand_ins[name] = stand_in
    saved = remove_tied_weights_from_state_dict(stand_ins, model)
    left_out = set(model._keys_to_ignore_on_save or ())
    return {name: meta for name, meta in entries.items() if name in saved and name not in left_out}
