"""Attention's two products in onnxruntime: in float, and in integers as far as onnxruntime has kernels for them.

python benchmarks/engines/attention_in_integers.py

Queries, keys and values arrive as the 8-bit integers that a quantized projection gives, so that nothing is rounded for
the integer products but the probabilities. All files run in this process, in turn, on one thread; a time is the median
of the process's CPU time.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

#: (batch, heads, tokens, head_dim)
SHAPES = [(1, 3, 197, 64), (32, 3, 17, 64), (1, 6, 128, 64), (1, 12, 512, 64)]
CONSTANTS = {
    "step": np.float32(0.02),
    "zero": np.uint8(128),
    "probability_step": np.float32(1 / 2000),
    "probability_zero": np.uint8(0),
    "scaling": np.float32(0.125),
}
WAYS = {
    "float": {"scale_first": True, "quantize_probabilities": False},
    "first product in integers": {"scale_first": False, "quantize_probabilities": False},
    "both products in integers": {"scale_first": False, "quantize_probabilities": True},
}


def graph_of(shape: tuple[int, ...], scale_first: bool, quantize_probabilities: bool) -> bytes:
    """Attention as a file's content.

    Args:
        shape: of queries, keys and values.
        scale_first: scale the queries, which makes the first product one of float numbers, not its result.
        quantize_probabilities: the second product is one of integers.
    """
    nodes = []

    def add(kind: str, inputs: str, output: str, **attributes: object) -> None:
        nodes.append(helper.make_node(kind, inputs.split(), [output], **attributes))

    for name in ("query", "key", "value"):
        add("DequantizeLinear", f"{name} step zero", f"{name}_float")
    add("Transpose", "key_float", "key_transposed", perm=[0, 1, 3, 2])
    if scale_first:
        add("Mul", "query_float scaling", "query_scaled")
        add("MatMul", "query_scaled key_transposed", "scores")
    else:
        add("MatMul", "query_float key_transposed", "products")
        add("Mul", "products scaling", "scores")
    add("Softmax", "scores", "probabilities")
    probabilities = "probabilities"
    if quantize_probabilities:
        add("QuantizeLinear", "probabilities probability_step probability_zero", "codes")
        add("DequantizeLinear", "codes probability_step probability_zero", "rounded")
        probabilities = "rounded"
    add("MatMul", f"{probabilities} value_float", "attended")
    add("QuantizeLinear", "attended step zero", "output")
    inputs = [helper.make_tensor_value_info(name, TensorProto.UINT8, shape) for name in ("query", "key", "value")]
    outputs = [helper.make_tensor_value_info("output", TensorProto.UINT8, shape)]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in CONSTANTS.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def medians(shape: tuple[int, ...], rounds: int = 40) -> dict[str, float]:
    """The median CPU milliseconds of each way."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    sessions = {}
    for way, arguments in WAYS.items():
        sessions[way] = onnxruntime.InferenceSession(graph_of(shape, **arguments), options)
    generator = np.random.default_rng(0)
    feeds = {name: generator.integers(0, 255, shape, dtype=np.uint8) for name in ("query", "key", "value")}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, session in sessions.items():
            started = time.process_time()
            session.run(None, feeds)
            times[way].append(1e3 * (time.process_time() - started))
    return {way: median(values[3:]) for way, values in times.items()}


def main() -> None:
    print(f"onnxruntime {onnxruntime.__version__}")
    print(f"| batch, heads, tokens, width | {' | '.join(WAYS)} |\n|---|---|---|---|")
    for shape in SHAPES:
        cells = [f"{milliseconds:.2f} ms" for milliseconds in medians(shape).values()]
        print(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
