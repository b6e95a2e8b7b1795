"""Lightning Fabric: calibrate what `fabric.setup` gives back, in a loop of your own, on one device or several.

python examples/13_fabric.py --out mlp_int8
python examples/13_fabric.py --out mlp_int8 --devices 2
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_obs import CalibrationSession, export_checkpoint, load_checkpoint, quantized
from lightning_obs.ranks.collectives import Collectives

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


fabric = Fabric(accelerator="cpu", devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
fabric.launch()
model = fabric.setup(build())
samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples), batch_size=8))

# Names are those of the module that was given to fabric.setup. Each rank runs its share; all find the same scales.
ranks = Collectives.of_group() if fabric.world_size > 1 else None
with CalibrationSession(model, "INT8_STATIC", collectives=ranks) as session, torch.no_grad():
    for (batch,) in loader:
        model(batch)

if fabric.is_global_zero:  # where weights are sharded (FSDP), every rank calls it
    export_checkpoint(model, options.out)
    with torch.no_grad(), quantized(model):
        expected = model(samples)
    loaded = load_checkpoint(build(), options.out)(samples)
    print(f"{', '.join(session.result.modules)} on {session.result.ranks} rank(s)")
    print("largest difference after loading:", (loaded - expected).abs().max().item())
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
