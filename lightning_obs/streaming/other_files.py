"""Copy the files beside the weights of a checkpoint: tokenizer, processor, code, licence."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lightning_obs.errors import warn
from lightning_obs.files.write import CONTENTS_FILE

#: endings of files that hold weights; only safetensors files are read
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
#: the files of weights, and their index, that transformers reads
_READ_BY_TRANSFORMERS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def copy_other_files(folder: Path, new_folder: Path) -> None:
    """Copy the files beside a source's weights into a new checkpoint; files that exist there already stay.

    Left out are weights, hidden files and the list of an export's files. A warning names weights that transformers does
    not read, such as ``consolidated.safetensors``. ``quantize_checkpoint`` calls this before it writes weights,
    ``calibrate_layerwise`` and the command line at their end.

    Args:
        folder: of the source.
        new_folder: of the new checkpoint.
    """
    left_out = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_hidden = any(component.startswith(".") for component in name.parts)
        if is_hidden or not path.is_file() or name.as_posix() == CONTENTS_FILE:
            continue
        if name.name.removesuffix(".index.json").endswith(_WEIGHTS):
            if not _READ_BY_TRANSFORMERS.fullmatch(name.as_posix()):
                left_out.append(name.as_posix())
            continue
        new_path = new_folder / name
        if not new_path.exists():
            new_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new_path)
    if left_out:
        warn(f"weights in {folder} that transformers does not read were left out: {', '.join(left_out)}")
