"""What a user would start: python tests/support/ddp_script.py FOLDER --devices 2, or the same by torchrun.

Each rank writes its qparams to FOLDER/<rank>.pt. With --unreached no sample goes to the third expert.
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
    parser.add_argument("--unreached", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    callback = calibration(input="histogram", weight="memoryless_mse")
    strategy = "ddp" if options.devices * options.nodes > 1 else "auto"
    with_trainer = trainer(callback, ranks=options.devices, num_nodes=options.nodes, strategy=strategy)
    data = loader(samples(24, experts=(0, 1) if options.unreached else (0, 1, 2)))
    with_trainer.validate(Module(), data, verbose=False)
    torch.save(callback.result.qparams, options.folder / f"{with_trainer.global_rank}.pt")
    callback.export(options.folder / "out")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
