"""Programs of torch.export: what they compute, how small they are, what is refused."""

import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lightning_obs import (
    CalibrationError,
    CalibrationSession,
    export_checkpoint,
    export_program,
    load_checkpoint,
    quantized,
)
from lightning_obs.forward.tracing import exporter_error

WEIGHTS = {"num_bits": 8, "strategy": "channel"}
INPUTS = {"num_bits": 8, "observer": "static_minmax"}
ASYMMETRIC = {**INPUTS, "symmetric": False}
WEIGHT_ONLY = {"targets": ["Linear"], "weights": WEIGHTS}
GROUPS = {"num_bits": 4, "group_size": 16}
DYNAMIC = torch.export.Dim.DYNAMIC


class Norms(nn.Module):
    """A convolution, and a Linear, before batch norms that have seen data; one factor of each is negative."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
        for norm in (self.first[1], self.second[1]):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.weight.data[2] *= -1
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, image):
        return self.second(self.first(image).mean((-2, -1)))


class Upward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.Conv1d(1, 4, 3), nn.ReLU())

    def forward(self, image):
        return self[2](self[1](self[0](image)).flatten(1).unsqueeze(1))


def tokens():
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))


IMAGES = (Norms, lambda: torch.randn(4, 3, 9, 9))
UPWARD = (Upward, lambda: torch.randn(4, 3, 9, 9))
TOKENS = (tokens, lambda: torch.randint(0, 50, (2, 7)))
CONVOLUTIONS = ["Conv1d", "Conv2d", "ConvTranspose2d", "Linear"]
CASES = {
    "inputs": (IMAGES, {"targets": CONVOLUTIONS, "weights": WEIGHTS, "input_activations": INPUTS}),
    "one scale": (IMAGES, {"targets": CONVOLUTIONS, "weights": {"strategy": "tensor"}, "input_activations": INPUTS}),
    "asymmetric inputs": (UPWARD, {"targets": CONVOLUTIONS, "weights": WEIGHTS, "input_activations": ASYMMETRIC}),
    "asymmetric weights": (UPWARD, {"targets": CONVOLUTIONS, "weights": {**WEIGHTS, "symmetric": False}}),
    "outputs": (TOKENS, {"targets": ["Linear"], "weights": WEIGHTS, "output_activations": ASYMMETRIC}),
    "inputs of 4 bits": (
        TOKENS,
        {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {**INPUTS, "num_bits": 4}},
    ),
    "embedding": (TOKENS, {"targets": ["Embedding"], "weights": WEIGHTS}),
    "groups": (TOKENS, {"targets": ["Linear"], "weights": GROUPS}),
    "asymmetric groups": (TOKENS, {"targets": ["Linear"], "weights": {**GROUPS, "num_bits": 3, "symmetric": False}}),
}


def calibrated(model, x, scheme):
    model.eval()
    scheme = {"group": scheme} if isinstance(scheme, dict) else scheme
    with CalibrationSession(model, scheme) as session, torch.no_grad():
        if session.needs_data:
            model(x)
    return model


def outputs_of(model, x):
    """The model's outputs in float, and quantized."""
    with torch.no_grad():
        in_float = model(x)
        with quantized(model):
            return in_float, model(x)


def operations(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.* stay in full precision")
def test_a_loaded_program_computes_what_quantized_does(case, tmp_path):
    (build, make_input), scheme = CASES[case]
    x = make_input()
    model = calibrated(build(), x, scheme)
    x = make_input()  # in symmetric schemes, what was calibrated has a value halfway between two integers
    in_float, expected = outputs_of(model, x)
    names = list(model.state_dict())
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    with torch.no_grad():
        outputs = program.module()(x)
        assert torch.equal(model(x), in_float)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)
    assert (in_float - expected).abs().max() > 1e-3
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_a_program_is_loaded_by_torch_alone(tmp_path):
    x = torch.randn(2, 16)
    model = calibrated(mlp(), torch.randn(2, 16), "INT8_STATIC")
    file = export_program(model, tmp_path / "m.pt2", x)
    torch.save((x, outputs_of(model, x)[1]), tmp_path / "expected.pt")
    script = (
        "import sys, torch, torch.ao.quantization.fx._decomposed\n"
        f"x, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"outputs = torch.export.load({str(file)!r}).module()(x)\n"
        "print((outputs - expected).abs().max().item() < 1e-6, 'lightning_obs' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "True False\n", done.stderr


def test_a_program_holds_weights_as_integers_and_none_of_the_examples_values(tmp_path):
    x = torch.randn(2, 512)
    model = calibrated(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), x, "INT8_STATIC")
    file = export_program(model, tmp_path / "m.pt2", x)
    program = torch.export.load(file)
    tensors = {**program.state_dict, **program.constants}
    matrices = {name: value.dtype for name, value in tensors.items() if value.ndim > 1}
    assert matrices == {"0.weight_codes": torch.int8, "1.weight_codes": torch.int8}
    in_float = sum(value.nbytes for value in model.state_dict().values())
    assert file.stat().st_size < 0.3 * in_float
    [[example], _] = program.example_inputs
    assert torch.equal(example, torch.zeros_like(x))


@pytest.mark.slow
def test_what_was_loaded_gives_the_same_program(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    model = calibrated(Norms(), x, CASES["inputs"][1])
    loaded = load_checkpoint(Norms().eval(), export_checkpoint(model, tmp_path / "folder"))
    outputs = []
    for name, exported in {"a": model, "b": loaded}.items():
        program = torch.export.load(export_program(exported, tmp_path / f"{name}.pt2", x))
        outputs.append(program.module()(x))
    assert torch.equal(*outputs)


# ---------------------------------------------------------------------- batch norms


def test_batch_norms_are_folded_and_scales_stay_positive(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    model = Norms()
    with torch.no_grad():  # no code is -128, which has no counterpart
        model.first[0].weight.clamp_(-0.1)
        model.first[0].weight[:, 0, 0, 0] = 0.2
        model.second[0].weight.clamp_(-0.1)
        model.second[0].weight[:, 0] = 0.3
    calibrated(model, x, CASES["inputs"][1])
    x = torch.randn_like(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    assert not any("batch_norm" in operation for operation in operations(program))
    tensors = {**program.state_dict, **program.constants}
    steps = [value for name, value in tensors.items() if name.endswith("_step")]
    assert len(steps) == 2
    assert all(bool((step > 0).all()) for step in steps)
    torch.testing.assert_close(program.module()(x), outputs_of(model, x)[1], atol=1e-6, rtol=1e-5)


def test_a_batch_norm_stays_where_a_code_has_no_counterpart(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    model = Norms()
    with torch.no_grad():
        model.first[0].weight[2, 0, 0, 0] = -1
    calibrated(model, x, CASES["inputs"][1])
    x = torch.randn_like(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    assert "aten.batch_norm.default" in operations(program)
    torch.testing.assert_close(program.module()(x), outputs_of(model, x)[1], atol=1e-6, rtol=1e-5)


def test_a_channel_that_a_batch_norm_switches_off_keeps_a_positive_scale(tmp_path):
    x = torch.randn(4, 3, 9, 9)
    model = Norms()
    nn.init.zeros_(model.first[1].weight[2:4])
    nn.init.ones_(model.first[1].weight[4:])
    calibrated(model, x, CASES["inputs"][1])
    x = torch.randn_like(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    tensors = {**program.state_dict, **program.constants}
    assert all(bool((value > 0).all()) for name, value in tensors.items() if name.endswith("_step"))
    torch.testing.assert_close(program.module()(x), outputs_of(model, x)[1], atol=1e-6, rtol=1e-5)


class Normed(nn.Module):
    """A convolution and a batch norm that takes statistics of its batch, or whose beta is computed."""

    def __init__(self, *, training, computed):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.bias, 1, 2)
        self.training_of_norm = training
        self.computed = computed

    def forward(self, image):
        norm = self.norm
        beta = norm.bias.exp() if self.computed else norm.bias
        value = self.conv(image)
        return nn.functional.batch_norm(
            value, norm.running_mean, norm.running_var, norm.weight, beta, self.training_of_norm
        )


@pytest.mark.parametrize("how", [{"training": True, "computed": False}, {"training": False, "computed": True}])
def test_a_batch_norm_stays_whose_parameters_are_no_constants(how, tmp_path):
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Normed(**how), x, CASES["inputs"][1])
    x = torch.randn_like(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    assert "aten.batch_norm.default" in operations(program)
    with torch.no_grad(), quantized(model):
        expected = model(x)
    torch.testing.assert_close(program.module()(x), expected, atol=1e-5, rtol=1e-5)


class Reused(nn.Module):
    """What the convolution gives is read by the batch norm and beside it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, image):
        value = self.conv(image)
        return self.norm(value) + value


def test_a_batch_norm_stays_where_something_else_reads_what_it_reads(tmp_path):
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Reused(), x, CASES["inputs"][1])
    x = torch.randn_like(x)
    program = torch.export.load(export_program(model, tmp_path / "m.pt2", x))
    assert "aten.batch_norm.default" in operations(program)
    torch.testing.assert_close(program.module()(x), outputs_of(model, x)[1], atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------- examples


class Series(nn.Module):
    """Takes one dict, as models of series do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, batch):
        return {"mean": self.fc(batch["past"]), "width": self.fc(batch["past"] * batch["scale"]).abs()}


def test_a_model_may_take_one_dict_and_return_another(tmp_path):
    batch = {"past": torch.randn(3, 16), "scale": torch.rand(3, 1)}
    model = calibrated(Series(), batch, "INT8_STATIC")
    shapes = ({"past": {0: DYNAMIC}, "scale": {0: DYNAMIC}},)
    file = export_program(model, tmp_path / "m.pt2", (batch,), dynamic_shapes=shapes)
    other = {"past": torch.randn(5, 16), "scale": torch.rand(5, 1)}
    outputs = torch.export.load(file).module()(batch=other)
    torch.testing.assert_close(outputs, outputs_of(model, other)[1], atol=1e-6, rtol=1e-5)


def test_a_batch_of_any_size_and_keyword_arguments(tmp_path):
    model = calibrated(Norms(), torch.randn(4, 3, 9, 9), CASES["inputs"][1])
    example = {"image": torch.randn(2, 3, 9, 9)}
    file = export_program(model, tmp_path / "m.pt2", example, dynamic_shapes={"image": {0: DYNAMIC}})
    x = torch.randn(5, 3, 9, 9)
    outputs = torch.export.load(file).module()(image=x)
    torch.testing.assert_close(outputs, outputs_of(model, x)[1], atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------- refused


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def refused(model, message, tmp_path, x=None, **options):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CalibrationError, match=message):
        export_program(model, tmp_path / "m.pt2", torch.randn(2, 16) if x is None else x, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("build", "scheme", "message"),
    [
        (mlp, "FP8", r"cannot hold 8-bit floating point: 0 \(weight\), 0 \(input\).*Expected integers.*INT8_STATIC"),
        (mlp, "W8A8", r"range is found at run time: 0 \(input\), 2 \(input\)"),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (16, 1, 1)), nn.Conv2d(16, 4, 1)),
            {"targets": ["Conv2d"], "weights": GROUPS},
            r"weights of 4 dimensions per group: 1 \(weight\)",
        ),
    ],
)
def test_a_scheme_that_the_operations_cannot_express_is_refused(build, scheme, message, tmp_path):
    refused(calibrated(build(), torch.randn(2, 16), scheme), message, tmp_path)


def test_a_model_that_is_not_ready_is_refused(tmp_path):
    refused(mlp().eval(), "Sequential was not calibrated.*CalibrationSession", tmp_path)
    changed = calibrated(mlp(), torch.randn(2, 16), WEIGHT_ONLY)
    with torch.no_grad():
        changed[0].weight.mul_(2)
    refused(changed, r"changed since the model was calibrated: 0\.weight", tmp_path)
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    refused(calibrated(mlp().bfloat16(), x, WEIGHT_ONLY), r"not in float32.*0\.bias \(torch\.bfloat16\)", tmp_path, x)


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path):
    model = calibrated(mlp(), torch.randn(2, 16), WEIGHT_ONLY)
    (tmp_path / "m.pt2").write_text("precious")
    refused(model, r"m\.pt2 is already there.*overwrite=True", tmp_path)
    assert (tmp_path / "m.pt2").read_text() == "precious"
    export_program(model, tmp_path / "m.pt2", torch.randn(2, 16), overwrite=True)
    assert torch.export.load(tmp_path / "m.pt2")


def test_a_name_that_torch_would_not_load_is_refused(tmp_path):
    model = calibrated(mlp(), torch.randn(2, 16), WEIGHT_ONLY)
    with pytest.raises(CalibrationError, match=r"Got model\.pt, expected a name that ends in \.pt2"):
        export_program(model, tmp_path / "model.pt", torch.randn(2, 16))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


def test_what_cannot_be_traced_names_the_line_of_the_model(tmp_path):
    model = calibrated(Branch(), torch.ones(2, 16), WEIGHT_ONLY)
    refused(model, r"torch\.export cannot export Branch: .*test_program_file\.py:\d+\. Got \w+", tmp_path)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class OfPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return Pair(self.fc(x), x)


def test_a_class_of_outputs_that_no_file_holds_is_refused(tmp_path):
    model = calibrated(OfPair(), torch.ones(2, 16), WEIGHT_ONLY)
    refused(model, "cannot export OfPair.*Can't serialize TreeSpec of namedtuple.* Remedy: let the model", tmp_path)


def test_a_disk_without_room_is_named_and_nothing_is_left(tmp_path):
    """In a process of its own, whose files may have no more than 2 KiB."""
    lines = [
        "import resource, sys, torch",
        "from lightning_obs import CalibrationSession, export_program",
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64))",
        "with CalibrationSession(model.eval(), {'weights': {'num_bits': 8, 'strategy': 'channel'}}):",
        "    pass",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))",
        "export_program(model, sys.argv[1], torch.ones(2, 64))",
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "m.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"CalibrationError: .*m\.pt2 cannot be written.*has room", done.stderr)
    assert not list(tmp_path.iterdir())


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(x.view(2, 16))


def test_a_size_that_the_model_fixes_is_named_with_the_reason(tmp_path):
    model = calibrated(OfTwo(), torch.ones(2, 16), WEIGHT_ONLY)
    with pytest.raises(
        CalibrationError, match=r"OfTwo.*size\(\)\[0\] as dynamic but your code specialized it .* \(2\)"
    ):
        export_program(model, tmp_path / "m.pt2", torch.ones(2, 16), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("One line", "One line"),
        ("A line\n  - and its reason\n\nAdvice", "A line - and its reason"),
        ("Conflicts:\n\n- the batch is 2\n\nAdvice", "Conflicts: - the batch is 2"),
        ("a" * 600, "a" * 500 + "..."),
        ("", ""),
    ],
)
def test_the_error_of_an_exporter_is_said_with_its_reason(text, said):
    error = exporter_error("the exporter", nn.ReLU(), ValueError(text), "none.")
    assert error.got == f"ValueError: {said}"
