"""What 8B, 70B and 405B parameters cost to quantize: bytes, minutes and memory, reckoned from measured costs.

    python benchmarks/cost/reckoning.py                    # a disk of 2 GB/s, PCIe of 25 GB/s, 8 cores
    python benchmarks/cost/reckoning.py --disk 6 --pcie 50 --cores 32

Shapes are those of Llama 3.1, in bfloat16. Bytes are arithmetic. Seconds of one core are those that `memory.py` has
measured on 1.1B parameters, for each parameter that is quantized; reading, computing and writing are added, not
overlapped, and so many workers are taken for so many cores. The time in which a model runs its batches is not in it: it
is that of the device. Memory of `task=weights` is that of the measured run, for each byte of its largest fused set.

Memory of fine-tuning through W4A16 is that of weights, gradients and AdamW's two states, all in bfloat16 or the states
in a byte each, of the scales, and of 1 x 2,048 tokens whose blocks are checkpointed: the input of every block, what one
block keeps, one quantized weight, and the logits as often as `qat_memory.py logits` has measured.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

#: CPU seconds on one core for a billion quantized parameters, read and written: "files ..." rows of memory.py, 0.97B
CORE = {"W4A16 minmax": 6.7 / 0.97, "W4A16 mse": 23.1 / 0.97, "FP8_DYNAMIC": 7.1 / 0.97, "NVFP4A16": 10.6 / 0.97}
#: bytes of a quantized parameter with its share of the scales: groups of 128, none to speak of, groups of 16
STORED = {"W4A16": 0.5 + 2 / 128, "FP8": 1.0, "NVFP4": 0.5 + 1 / 16}
#: peak memory for a byte of the largest fused set: 93 MB at 46 MB (gate and up of 2048 x 5632)
PER_BYTE = 93 / 46
#: passes over all weights of a calibration on 8 batches with an export, of a model that is offloaded
PASSES = 8 + 2 + 2
#: copies of the logits in float32 at the peak of a step: row W4A16 of `qat_memory.py logits`
LOGITS = 3.31
TOKENS = 2048


@dataclass(frozen=True)
class Shape:
    """A Llama: sizes of its matrices."""

    hidden: int
    layers: int
    inner: int
    cache: int = 1024
    vocabulary: int = 128256

    @property
    def block(self) -> int:
        """Parameters of one block that are quantized."""
        return self.hidden * (2 * self.hidden + 2 * self.cache + 3 * self.inner)

    @property
    def quantized(self) -> int:
        return self.layers * self.block

    @property
    def rest(self) -> int:
        """Embedding and head."""
        return 2 * self.vocabulary * self.hidden


MODELS = {"8B": Shape(4096, 32, 14336), "70B": Shape(8192, 80, 28672), "405B": Shape(16384, 126, 53248)}


def reckon(model: Shape, disk: float, pcie: float, cores: int) -> dict[str, str]:
    """A column of the table."""
    read = 2 * (model.quantized + model.rest) / 1e9
    written = {kind: (model.quantized * size + 2 * model.rest) / 1e9 for kind, size in STORED.items()}

    def weights(kind: str, workers: int) -> float:
        size = next(size for stored, size in written.items() if kind.startswith(stored))
        return (read + size) / disk + CORE[kind] * model.quantized / 1e9 / workers

    found = {"read [GB]": f"{read:,.0f}"}
    found[f"written, {' / '.join(written)} [GB]"] = " / ".join(f"{size:,.0f}" for size in written.values())
    for kind in CORE:
        times = " / ".join(f"{weights(kind, workers) / 60:,.1f}" for workers in (1, cores))
        found[f"`task=weights` {kind}, 1 / {cores} workers [min]"] = times
    found["its memory, for each worker [GB]"] = f"{PER_BYTE * 2 * 2 * model.hidden * model.inner / 1e9:,.1f}"
    found["one pass over the weights, disk / PCIe [s]"] = f"{read / disk:,.0f} / {read / pcie:,.0f}"
    passes = (PASSES * read / speed + written["FP8"] / disk for speed in (disk, pcie))
    found["static FP8, 8 batches, from disk / from the host [min]"] = " / ".join(f"{x / 60:,.1f}" for x in passes)
    once = (read + written["FP8"]) / disk + read / pcie
    found["static FP8, weights read once, from disk [min]"] = f"{once / 60:,.1f}"
    found["one block [GB]"] = f"{2 * model.block / 1e9:,.1f}"
    sizes = " / ".join(f"{fine_tuning(model, state_bytes):,.0f}" for state_bytes in (4, 2))
    found["W4A16 fine-tuning, states in bfloat16 / 8 bits [GB]"] = sizes
    return found


def fine_tuning(model: Shape, state_bytes: int) -> float:
    """Memory of a fine-tuning step through W4A16 on one device [GB].

    Args:
        model: in bfloat16, with gradients in bfloat16.
        state_bytes: of the optimizer for a parameter.
    """
    parameters = model.quantized + model.rest
    scales = 2 * model.quantized / 128
    block_values = 12 * model.hidden + 4 * model.cache + 4 * model.inner  # that a block keeps for a token
    activations = 2 * TOKENS * (model.layers * model.hidden + block_values)
    quantized_weight = 2 * model.hidden * model.inner
    logits = LOGITS * 4 * TOKENS * model.vocabulary
    return ((4 + state_bytes) * parameters + scales + activations + quantized_weight + logits) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", type=float, default=2, help="GB/s")
    parser.add_argument("--pcie", type=float, default=25, help="GB/s")
    parser.add_argument("--cores", type=int, default=8)
    options = parser.parse_args()
    columns = {name: reckon(model, **vars(options)) for name, model in MODELS.items()}
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for row in columns["8B"]:
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main()
