"""Load a checkpoint as its users will, and compare its output. Run as a file, so that lightning_obs is not imported.

``checkpoint.py`` runs it in a new process after an export, and imports :func:`align` and :func:`first_tensor` for the
reference:

    python reload_check.py CHECKPOINT REFERENCE.safetensors [--dequantize] [--trust-remote-code]

The reference holds the inputs by their names, and ``output``. Prints a line of JSON: the largest difference of the
outputs, their kind (logits, or else hidden states), and the version of transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Load the checkpoint with transformers, run it on the reference's inputs, and print the line of JSON.

    Called when the file is run; the arguments are those of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("reference")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    folder = str(Path(__file__).parent)
    sys.path = [entry for entry in sys.path if entry != folder]  # files beside this one would hide packages
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    trust = options.trust_remote_code
    arguments: dict[str, Any] = {"trust_remote_code": trust}
    if options.dequantize:
        arguments["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    config = transformers.AutoConfig.from_pretrained(options.checkpoint, trust_remote_code=trust)
    # transformers does not have the class of a model that comes with its own code
    model_class = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
    model = model_class.from_pretrained(options.checkpoint, **arguments).eval()
    align(model)
    inputs = load_file(options.reference)
    expected = inputs.pop("output")
    with torch.inference_mode():
        kind, output = first_tensor(model(**inputs))
    difference = (output.double() - expected.double()).abs().max().item()
    print(json.dumps({"difference": difference, "kind": kind, "transformers": transformers.__version__}))


def align(model: Any) -> None:
    """Make equal models give equal bits, by the same order of every summation; the model is changed in place.

    Called for the calibrated model and for the loaded model, before each runs on the sample.

    Experts run one by one, since transformers' other ways of running them add in another order. MKL's order depends on
    the address of a matrix, and safetensors maps tensors from the file at any offset: tensors whose address is not a
    multiple of 64 bytes are copied to memory that torch allocates.
    """
    has_experts = any("Experts" in type(module).__name__ for module in model.modules())
    if has_experts and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for tensor in [*model.parameters(), *model.buffers()]:
        data = tensor.data
        is_sharded = hasattr(data, "to_local")  # torch has allocated the memory of a shard
        if not is_sharded and data.data_ptr() % 64:
            tensor.data = data.clone()


def first_tensor(output: Any) -> tuple[str, Any]:
    """Return the tensor to compare in a model's output: the logits, or else the first tensor that is not empty.

    Called for the outputs of the calibrated model and of the loaded model: by :func:`main`, and by ``checkpoint.py``.

    Args:
        output: an output of transformers, a tensor, or tuples, lists and dicts of tensors.

    Returns:
        Its kind in words (``logits``, ``hidden states`` or ``outputs``), and the tensor.

    Raises:
        ValueError: the output has no tensor, or only empty ones.
    """
    from torch import Tensor  # here, because `main` must first take this file's folder off the path
    from torch.utils._pytree import tree_leaves

    if getattr(output, "logits", None) is not None:
        return "logits", output.logits
    kind = "outputs"
    nested = output
    if hasattr(output, "to_tuple"):  # an output of transformers
        kind = "hidden states"
        nested = output.to_tuple()
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor) and leaf.numel():
            return kind, leaf
    raise ValueError(f"{type(output).__name__} has no tensor to compare")


if __name__ == "__main__":
    main()
