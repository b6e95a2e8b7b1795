"""Load a checkpoint as its users will, and compare its output. Run as a file, so that lightning_obs is not imported.

python reload_check.py CHECKPOINT REFERENCE.safetensors [--dequantize] [--trust-remote-code]

The reference holds the inputs by their names, and ``output``. Prints one line of JSON: the largest difference of logits
(of hidden states, where there are none), and the version of transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Load, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("reference")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    here = str(Path(__file__).parent)  # the files beside this one are not packages
    sys.path = [entry for entry in sys.path if entry != here]
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    how: dict[str, Any] = {}
    if options.dequantize:
        how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    trusted = options.trust_remote_code
    config = transformers.AutoConfig.from_pretrained(options.checkpoint, trust_remote_code=trusted)
    # The class of a model that comes with its own code is not in transformers.
    kind = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
    model = kind.from_pretrained(options.checkpoint, trust_remote_code=trusted, **how).eval()
    align(model)
    inputs = load_file(options.reference)
    expected = inputs.pop("output")
    with torch.inference_mode():
        what, output = first_tensor(model(**inputs))
    answer = {"difference": (output.double() - expected.double()).abs().max().item(), "what": what}
    print(json.dumps({**answer, "transformers": transformers.__version__}))


def align(model: Any) -> None:
    """Let equal models give equal bits: experts run one by one, and tensors have memory of their own.

    transformers' other ways of running experts add in another order. safetensors maps tensors from the file at any
    offset, and MKL's order of summation depends on the address of a matrix: those whose address is not a multiple of
    64 bytes are copied to memory as torch allocates it.
    """
    has_experts = any("Experts" in type(module).__name__ for module in model.modules())
    if has_experts and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for tensor in [*model.parameters(), *model.buffers()]:
        data = tensor.data
        if not hasattr(data, "to_local") and data.data_ptr() % 64:  # the memory of a sharded one was allocated
            tensor.data = data.clone()


def first_tensor(output: Any) -> tuple[str, Any]:
    """The tensor of a model's output to compare, with its name: the logits, or else the first tensor."""
    if getattr(output, "logits", None) is not None:
        return "logits", output.logits
    if hasattr(output, "to_tuple"):
        return "hidden states", output.to_tuple()[0]
    return "outputs", output


if __name__ == "__main__":
    main()
