"""Weights compressed in blocks of rows, and weights that ranks share. Each `on_*` function runs on every rank."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_obs import CalibrationError, CalibrationSession, export_checkpoint
from lightning_obs.checkpoint.entries import compressor_of, module_entries
from lightning_obs.model.module_qparams import get_scheme, read_qparams
from lightning_obs.ranks.collectives import Collectives
from lightning_obs.schemes.config import preset_names
from tests.support.rank_processes import run_ranks

SCHEMES = [
    "FP8", "FP8_BLOCK", "FP8_DYNAMIC", "W8A8", "INT8_STATIC", "W4A8", "W4A16", "W3A16", "W8A16", "MXFP4", "MXFP6A16",
    "MXFP8", "NVFP4", "NVFP4A16",
]  # fmt: skip
SCHEMES = [name for name in SCHEMES if name in preset_names()]  # compressed-tensors 0.19 has no MXFP6A16
WIDTH = 128


class Layers(nn.Module):
    """Rows that ranks do not divide, fewer rows than ranks, and rows that blocks of 128 divide."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.few, self.even = nn.Linear(WIDTH, 13), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 512)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return torch.cat([layer(x) for layer in (self.odd, self.few, self.even)], -1)


def calibrated(model, scheme, dtype, collectives=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not every scheme needs the data
        with CalibrationSession(model, scheme, engines="unchecked", collectives=collectives):
            model(torch.linspace(-1, 1, WIDTH, dtype=dtype).repeat(2, 1))
    return model


def plain(value):
    """Dtype, shape and bytes: torch cannot pickle every dtype."""
    return value.dtype, tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def sharded(model, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    return model


def on_exporting(rank, ranks, schemes, dtype, folder):
    for scheme in schemes:
        model = sharded(Layers().to(dtype), ranks)
        export_checkpoint(calibrated(model, scheme, dtype, Collectives.of_group()), folder / scheme)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_weights_that_ranks_share_are_stored_as_one_device_stores_them(ranks, dtype, tmp_path):
    schemes = [*SCHEMES, "W4A16_ASYM"]
    run_ranks(on_exporting, ranks, ranks, schemes, dtype, tmp_path)
    for scheme in schemes:
        model = calibrated(Layers().to(dtype), scheme, dtype)
        expected = export_checkpoint(model, tmp_path / f"{scheme} of one device")
        for file in expected.iterdir():
            assert (tmp_path / scheme / file.name).read_bytes() == file.read_bytes(), (scheme, file.name)


def add_shadow(module, state, prefix, metadata):
    state[f"{prefix}shadow"] = module.odd.bias.detach() * 2


def on_exporting_a_shadow(rank, folder):
    model = sharded(Layers(), 2)
    calibrated(model, "W4A16", torch.float32, Collectives.of_group())
    model.register_state_dict_post_hook(add_shadow)
    export_checkpoint(model, folder)


def test_a_sharded_tensor_that_a_hook_adds_to_the_state_dict_is_gathered_by_all_ranks(tmp_path):
    run_ranks(on_exporting_a_shadow, 2, tmp_path / "out", timeout=60)
    assert load_file(tmp_path / "out" / "model.safetensors")["shadow"].equal(Layers().odd.bias * 2)


def on_failing(rank, folder, what):
    model = sharded(Layers(), 2)
    calibrated(model, "W4A16", torch.float32, Collectives.of_group())
    if rank == 1 and what == "qparams":
        del model.even.weight_scale
    elif rank == 1:
        model.even.quantization_scheme.format = "none that there is"
    try:
        export_checkpoint(model, folder)
    except CalibrationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "message"), [("qparams", "even.weight_scale is missing"), ("format", "even (weight)")]
)
def test_what_fails_on_one_rank_is_raised_on_all_and_nothing_is_written(what, message, tmp_path):
    errors = run_ranks(on_failing, 2, str(tmp_path / "w4a16"), what)
    assert errors[0] == errors[1]
    assert message in errors[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("scheme", [*SCHEMES, "W4A16_ASYM", "INT8_STATIC_ASYM"])
def test_a_weight_that_is_compressed_in_blocks_of_rows_gives_the_file_of_the_whole(scheme, tmp_path, monkeypatch):
    model, written = calibrated(Layers().bfloat16(), scheme, torch.bfloat16), []
    for at_once in (1 << 20, 3 * WIDTH, 130 * WIDTH):
        monkeypatch.setattr("lightning_obs.checkpoint.entries._ELEMENTS_AT_ONCE", at_once)
        folder = export_checkpoint(model, tmp_path / str(at_once))
        written.append((folder / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", [*SCHEMES, "W4A16_ASYM", "INT8_STATIC_ASYM"])
def test_a_weight_is_stored_as_compressed_tensors_stores_it(scheme, dtype):
    layer = calibrated(nn.Sequential(nn.Linear(WIDTH, 130).to(dtype)), scheme, dtype)[0]
    own = {name: value.clone() for name, value in read_qparams(layer).items()}
    quarters = torch.arange(130 * WIDTH, dtype=dtype).reshape(130, WIDTH) % 31 * 0.25 - 4
    step = own["weight_scale"].float().mean() / own.get("weight_global_scale", torch.ones(1))
    own["weight"] = quarters * step.to(dtype) * torch.where(torch.arange(WIDTH) % 5 == 0, 100, 1)  # ties, and beyond
    own["weight"][:, 3:5] = torch.tensor([0.0, -0.0], dtype=dtype)
    expected = compressor_of(get_scheme(layer)).compress(dict(own), get_scheme(layer))
    layer.weight.data = own["weight"]
    found = {name: plain(value) for name, value, _ in module_entries(layer) if name != "bias"}
    assert found == {name: plain(value) for name, value in expected.items()}
