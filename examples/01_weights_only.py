"""Quantize the weights of a language model to 4 bits: no data, no Trainer.

python examples/01_weights_only.py --model <folder or hub name> --out w4a16
"""

import argparse

from lightning_obs import CalibrationSession, export_checkpoint
from lightning_obs.app.models.pretrained import load_pretrained

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=None, help="folder or hub name; default: SmolLM2-135M-Instruct")
parser.add_argument("--out", required=True)
options = parser.parse_args()

model, tokenizer = load_pretrained(options.model)

# Groups of 64: they divide the 576 columns of the default model, the preset's 128 do not.
w4a16 = {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}

with CalibrationSession(model, w4a16) as session:
    pass  # nothing to observe but the weights

print(f"{session.result.scheme}: {len(session.result.modules)} modules in {session.result.seconds:.1f} s")
print("wrote", export_checkpoint(model, options.out, tokenizer=tokenizer))
