"""Load a checkpoint as its users will, and compare its output. Run as a file, so that lightning_obs is not imported.

python reload_check.py CHECKPOINT REFERENCE.safetensors [--prompt TEXT] [--dequantize]

Prints one line of JSON: the largest difference of logits (of hidden states, where there are none), the text that was
generated, the packages that were used.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def main() -> int:
    """Return 0 if the outputs are equal, 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("reference", help="safetensors file with `output`, and the inputs as `input.<name>`")
    parser.add_argument("--prompt", default=None)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--dequantize", action="store_true")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")
    sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]  # our neighbours are no packages
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments = {}
    if options.dequantize:
        arguments["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    written_by = transformers.AutoConfig.from_pretrained(options.checkpoint).architectures[0]
    model = getattr(transformers, written_by).from_pretrained(options.checkpoint, **arguments).eval()
    if any("Experts" in type(module).__name__ for module in model.modules()):
        model.set_experts_implementation("eager")  # the others add in another order
    align(model)
    reference = load_file(options.reference)
    with torch.inference_mode():
        inputs = {name.removeprefix("input."): value for name, value in reference.items() if name != "output"}
        what, output = first_tensor(model(**inputs))
    difference = (output.double() - reference["output"].double()).abs().max().item()
    text = None
    if options.prompt is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
        inputs = tokenizer(options.prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False)
        text = tokenizer.decode(output[0], skip_special_tokens=True)
    print(
        json.dumps(
            {
                "difference": difference,
                "what": what,
                "text": text,
                "transformers": transformers.__version__,
                "lightning_obs_imported": "lightning_obs" in sys.modules,
            }
        )
    )
    return 0 if difference == 0.0 else 1


def align(model: Any) -> None:
    """Move tensors that lie at no multiple of 64 bytes to memory of their own, as torch allocates it.

    safetensors maps them from the file at any offset, and MKL adds a product's terms in an order that depends on where
    the matrix lies: equal models at other addresses differ in the last bit.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        data = tensor.data
        if hasattr(data, "to_local"):  # sharded: its memory was allocated
            continue
        if data.data_ptr() % 64:
            tensor.data = data.clone()


def first_tensor(output: Any) -> tuple[str, Any]:
    """The logits of a model's output, or the first tensor that it has, and what that is called."""
    if getattr(output, "logits", None) is not None:
        return "logits", output.logits
    if hasattr(output, "to_tuple"):
        return "hidden states", output.to_tuple()[0]
    return "outputs", output


if __name__ == "__main__":
    sys.exit(main())
