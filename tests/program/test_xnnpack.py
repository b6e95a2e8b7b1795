"""backend="xnnpack": layer norms, means and attention as products, with the same numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_obs import CalibrationError, CalibrationSession, export_program, quantized


class Net(nn.Module):
    """A Linear, and behind it what a case computes of it."""

    def __init__(self, compute):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.compute = compute

    def forward(self, x):
        return self.compute(self.fc(x))


def heads(x):
    return x.unflatten(-1, (4, 4)).transpose(1, 2)


def attention(mask=None, **options):
    def compute(x):
        added = None if mask is None else torch.tensor(mask)
        return F.scaled_dot_product_attention(heads(x), heads(x * 2), heads(x - 1), added, **options)

    return compute


MASK = [[0.0, -1.0, 2.0, 0.5, -torch.inf, 0.0]] * 6
NORM = nn.LayerNorm(16)
nn.init.normal_(NORM.weight)
nn.init.normal_(NORM.bias)
COMPUTED = {
    "layer norm": NORM,
    "layer norm without weight": lambda x: F.layer_norm(x, (16,), eps=0.1),
    "mean of channels": lambda x: x.mean(-1),
    "mean of channels, kept": lambda x: x.mean(2, keepdim=True),
    "mean of tokens": lambda x: x.mean(1),
    "mean of tokens, kept": lambda x: x.mean(1, keepdim=True),
    "mean of positions": lambda x: x.unflatten(1, (2, 3)).mean((-2, -1)),
    "attention": attention(),
    "attention to the past": attention(is_causal=True),
    "attention with a mask": attention(MASK),
    "attention with a scale": attention(scale=0.3),
}
LEFT = {
    "layer norm over two dimensions": lambda x: F.layer_norm(x, (6, 16)),
    "mean of all": lambda x: x.mean(),
    "mean of two dimensions": lambda x: x.mean((1, 2)),
    "mean in float64": lambda x: x.mean(-1, dtype=torch.float64),
    "attention with booleans": attention([[True, True, False, True, True, False]] * 6),
}
NAMES = ("layer_norm", "scaled_dot_product_attention")


def program_of(compute, folder, **options):
    """The operations of a program, its outputs, and those of ``quantized()``."""
    model = Net(compute).eval()
    with CalibrationSession(model, "INT8_STATIC"), torch.no_grad():
        model(torch.randn(4, 6, 16))
    x = torch.randn(2, 6, 16)
    program = torch.export.load(export_program(model, folder / "m.pt2", x, **options))
    with torch.no_grad(), quantized(model):
        expected = model(x)
    operations = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return operations, program.module()(x), expected


@pytest.mark.parametrize("case", COMPUTED)
def test_what_xnnpack_lacks_becomes_products_with_the_same_numbers(case, tmp_path):
    operations, outputs, expected = program_of(COMPUTED[case], tmp_path, backend="xnnpack")
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert not any(name in operation for operation in operations for name in NAMES)
    means = [operation for operation in operations if "mean" in operation]
    assert len(means) == (case == "mean of positions")


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_written_as_products_stays(case, tmp_path):
    operations, outputs, expected = program_of(LEFT[case], tmp_path, backend="xnnpack")
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert any(name in operation for operation in operations for name in (*NAMES, "mean"))


def test_sizes_that_vary_leave_a_mean_of_tokens_as_it_is(tmp_path):
    shapes = ({1: torch.export.Dim("tokens", min=2, max=64)},)
    operations, outputs, expected = program_of(lambda x: x.mean(1), tmp_path, backend="xnnpack", dynamic_shapes=shapes)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert "aten.mean.dim" in operations


def test_without_a_backend_the_model_is_written_as_it_computes(tmp_path):
    operations, _, _ = program_of(NORM, tmp_path)
    assert "aten.layer_norm.default" in operations


def test_an_unknown_backend_is_refused(tmp_path):
    with pytest.raises(CalibrationError, match=r"backend\. Got 'coreml', expected 'xnnpack', 'inductor'"):
        program_of(NORM, tmp_path, backend="coreml")
