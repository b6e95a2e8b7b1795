"""What a user would start: python tests/support/ddp_script.py FOLDER --devices 2, or the same by torchrun.

Each rank writes its qparams to FOLDER/<rank>.pt, and rank 0 the checkpoint to FOLDER/out. Then no sample goes to the
third expert, and the error of that ends the script.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.lightning_ranks import Module, calibration, loader, samples, trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    how = {"ranks": options.devices, "num_nodes": options.nodes, "strategy": "ddp"}
    callback = calibration(input="histogram", weight="memoryless_mse")
    with_trainer = trainer(callback, **how)
    with_trainer.validate(Module(), loader(samples(24, experts=(0, 1, 2))), verbose=False)
    torch.save(callback.result.qparams, options.folder / f"{with_trainer.global_rank}.pt")
    callback.export(options.folder / "out")
    with_trainer.strategy.barrier()
    callback = calibration(input="histogram", weight="memoryless_mse")
    trainer(callback, **how).validate(Module(), loader(samples(24, experts=(0, 1))), verbose=False)


if __name__ == "__main__":
    main()
