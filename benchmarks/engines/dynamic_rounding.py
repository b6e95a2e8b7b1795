"""How far an INT8_DYNAMIC file of a language model differs from ``quantized()``, and where the difference comes from.

python benchmarks/engines/dynamic_rounding.py

The default model on 256 tokens of Python's documentation. First what onnxruntime answers, beside what ``quantized()``
answers once its embeddings are multiplied by numbers next to 1, as another order of a sum might. Then the rounding
alone: the inputs of each Linear under ``quantized()``, given to onnxruntime's DynamicQuantizeLinear and to
compressed-tensors, whose integers are compared.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import onnxruntime
import torch
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from onnx import TensorProto, helper
from torch import nn

from lightning_obs import CalibrationSession, export_onnx, quantized
from lightning_obs.app.models.pretrained import load_pretrained
from lightning_obs.model.module_qparams import args_of, calibrated_modules

TOKENS = 256
FACTORS = (1.000001, 0.999999, 1.00001)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


def difference(outputs: torch.Tensor, expected: torch.Tensor) -> str:
    """Cells of a row: mean and largest difference, and the share of equal most likely tokens."""
    distance = (outputs - expected).abs()
    same = (outputs.argmax(-1) == expected.argmax(-1)).float().mean()
    return f"{distance.mean():.2f} | {distance.max():.1f} | {same:.0%}"


def dynamic_quantize_linear() -> onnxruntime.InferenceSession:
    """onnxruntime's rounding alone."""
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero_point"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    codes = helper.make_tensor_value_info("codes", TensorProto.UINT8, None)
    graph = helper.make_graph([node], "rounding", [x], [codes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def compare_rounding(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str:
    """How many integers differ between onnxruntime's rounding and ours, of the same inputs."""
    session = dynamic_quantize_linear()
    total = different = 0
    largest = farthest = 0.0
    for name, x in inputs.items():
        args = args_of(model.get_submodule(name), "input")
        scale, zero_point = calculate_qparams(x.min().reshape(1), x.max().reshape(1), args)
        expected = quantize(x, scale, zero_point, args, dtype=torch.int8).short() + 128
        [codes] = session.run(["codes"], {"x": x.numpy()})
        distance = (torch.from_numpy(codes).short() - expected).abs()
        quotients = x.double() / scale.double()
        from_half = (quotients - quotients.floor() - 0.5).abs()
        total += distance.numel()
        different += int((distance > 0).sum())
        largest = max(largest, float(distance.max()))
        farthest = max(farthest, float(torch.where(distance > 0, from_half, 0).max()))
    text = f"{different} of {total} integers differ, by at most {largest:.0f}; "
    return text + f"there x / scale is at most {farthest:.1e} from a half"


@torch.no_grad()
def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        language_model, tokenizer = load_pretrained(dtype="float32")
    text = "\n".join(topics[key] for key in sorted(topics))[: TOKENS * 12]
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, :TOKENS]
    model = Logits(language_model).eval()
    in_float = model(tokens)
    with CalibrationSession(model, "INT8_DYNAMIC"):
        pass
    with tempfile.TemporaryDirectory() as folder:
        file = export_onnx(model, Path(folder) / "model.onnx", tokens)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        [logits] = session.run(["output"], {session.get_inputs()[0].name: tokens.numpy()})
    inputs: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, module in calibrated_modules(model):
            hook = module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].clone()}))
            stack.callback(hook.remove)
        with quantized(model):
            expected = model(tokens)
    print("| compared with `quantized()` | mean difference of logits | largest | same top-1 |\n|---|---|---|---|")
    print(f"| the file in onnxruntime {onnxruntime.__version__} | {difference(torch.from_numpy(logits), expected)} |")
    for factor in FACTORS:
        embedding = language_model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, args, output, factor=factor: output * factor)
        with quantized(model):
            print(f"| `quantized()`, embeddings times {factor:.6f} | {difference(model(tokens), expected)} |")
        hook.remove()
    print(f"| the model in float | {difference(in_float, expected)} |")
    print(compare_rounding(model, inputs))


if __name__ == "__main__":
    main()
