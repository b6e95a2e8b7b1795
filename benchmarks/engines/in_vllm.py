"""Run one checkpoint in vLLM, in vLLM's environment, and write what it did as JSON. `engines.py` starts it.

    .venv-engines/bin/python benchmarks/engines/in_vllm.py CHECKPOINT JOB.json ANSWER.json [--plain] [--speed]

``JOB.json``: ``{"blocks": [[token ids]...], "prompt": [token ids], "dtype": "bfloat16"}``. The answer has the
log-probability of every token but the first of each block, the greedy continuation of the prompt, which kernels vLLM
chose, seconds to load, and with ``--speed`` tokens per second.

``--plain``: where vLLM has no kernel for the CPU, a plain one takes its place, so that names, shapes, dtypes and fused
scales are proven by vLLM's own loader and scheme classes, and no kernel is. Quantized experts have no such place; there
the loaded ``w13_*`` and ``w2_*`` are compared with the checkpoint.
"""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import argparse
import json
import logging
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

REPEATS, PREFILL, DECODE, CONTINUED = 3, 448, 48, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("job", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    job = json.loads(options.job.read_text())
    try:
        answer = run(options, job)
    except Exception as error:  # the table says so
        cause = error
        while cause.__cause__ is not None or cause.__context__ is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        answer = {"refused": f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause) else ''}"}
    options.answer.write_text(json.dumps(answer))


def run(options: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams, __version__

    kernels = Chosen()
    experts = Experts(options.checkpoint) if options.plain else None
    if options.plain:
        use_plain_kernels(json.loads((options.checkpoint / "config.json").read_text()))
        experts.watch()
    start = time.perf_counter()
    try:
        llm = LLM(
            model=str(options.checkpoint),
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=4,
            dtype=job["dtype"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            skip_tokenizer_init=True,
        )
    except Loaded as loaded:  # experts: nothing can be run
        return {"vllm": __version__, "experts": loaded.args[0]}
    answer: dict[str, Any] = {"vllm": __version__, "load": time.perf_counter() - start, "kernels": kernels.names()}
    measured = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer["logprobs"] = []
    for block in job["blocks"]:
        found = llm.generate([{"prompt_token_ids": block}], measured, use_tqdm=False)[0].prompt_logprobs
        answer["logprobs"].append([each[token].logprob for each, token in zip(found[1:], block[1:], strict=True)])
    greedy = SamplingParams(temperature=0, max_tokens=CONTINUED, ignore_eos=True, detokenize=False)
    answer["greedy"] = list(
        llm.generate([{"prompt_token_ids": job["prompt"]}], greedy, use_tqdm=False)[0].outputs[0].token_ids
    )
    if options.speed:
        answer |= speed(llm, (job["blocks"][0] * 8)[:PREFILL])
    return answer


def speed(llm: Any, tokens: list[int]) -> dict[str, float]:
    """Tokens per second: prefill of one prompt, decoding of one and of four sequences; medians."""
    from vllm import SamplingParams

    def seconds(prompts: int, length: int, new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        times = []
        for _ in range(REPEATS + 1):  # the first one warms up
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": tokens[:length]} for _ in range(prompts)], params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    short = 16
    return {
        "prefill": PREFILL / seconds(1, PREFILL, 1),
        "decode_1": DECODE / (seconds(1, short, DECODE + 1) - seconds(1, short, 1)),
        "decode_4": 4 * DECODE / (seconds(4, short, DECODE + 1) - seconds(4, short, 1)),
    }


class Chosen:
    """Remembers the kernels that vLLM says it uses; its loggers drop handlers that are not its own."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self)

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        self.said.append(record.getMessage())
        return record

    def names(self) -> list[str]:
        named = [re.match(r"(?:Selected|Using) (\w*Kernel) for", text) for text in self.said]
        return list(dict.fromkeys(match[1] for match in named if match))


# ---------------------------------------------------------------------- plain kernels


def use_plain_kernels(config: dict[str, Any]) -> None:
    """Give the CPU a kernel where vLLM has none, for each family of schemes."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes
    from vllm.platforms import PlatformEnum

    groups = list(config["quantization_config"]["config_groups"].values())
    given = [group.get("input_activations") for group in groups]
    quantize = Inputs(next(filter(None, given), None))
    packed = [args for args, group in zip(given, groups, strict=True) if _is_packed(group)]
    quantize_of_packed = Inputs(next(iter(packed), None))
    cpu = PlatformEnum.CPU

    class Always:
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, None]:
            return True, None

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

    class PlainFp8Kernel(Always, FP8ScaledMMLinearKernel):
        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            weight = (layer.weight.float() * layer.weight_scale.reshape(1, -1)).to(x.dtype)
            return torch.nn.functional.linear(self.read(layer, x), weight.t(), bias)

        def read(self, layer: Any, x: Any) -> Any:
            if layer.input_scale is None:
                return quantize(x)
            whole = (x.float() / layer.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return (whole.float() * layer.input_scale).to(x.dtype)

        def apply_scaled_mm(self, **_: Any) -> Any:
            raise NotImplementedError

    class PlainFp8WeightKernel(PlainFp8Kernel):
        def read(self, layer: Any, x: Any) -> Any:
            return x

    class PlainFp8BlockKernel(Always, Fp8BlockScaledMMLinearKernel):
        def apply_weights(self, layer: Any, x: Any, bias: Any = None, **_: Any) -> Any:
            rows, columns = self.weight_group_shape
            scale = layer.weight_scale.repeat_interleave(rows, 0)[: layer.weight.shape[0]]
            weight = layer.weight.float() * scale.repeat_interleave(columns, 1)[:, : layer.weight.shape[1]]
            return torch.nn.functional.linear(quantize(x), weight.to(x.dtype), bias)

        def apply_block_scaled_mm(self, **_: Any) -> Any:
            raise NotImplementedError

    class PlainIntegerKernel(Always, MPLinearKernel):
        def process_weights_after_loading(self, layer: Any) -> None:
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            packed, scale, zero = self._get_weight_params(layer)
            columns, rows = self.config.partition_weight_shape
            bits = self.config.weight_type.size_bits
            weight = unpack_from_int32(packed.data, bits, torch.Size([rows, columns])).float()
            if self.config.zero_points:
                zero = unpack_from_int32(zero.data, bits, torch.Size([rows, scale.shape[1]]), packed_dim=0)
                weight = weight - zero.float().repeat_interleave(columns // scale.shape[1], 1)
            layer.plain = weight * scale.float().repeat_interleave(columns // scale.shape[1], 1)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return torch.nn.functional.linear(quantize_of_packed(x), layer.plain.to(x.dtype), bias)

    class PlainFp4Kernel:
        """NVFP4 and MXFP4: elements in nibbles, scales per group."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def input_quant_key(self) -> None:
            return None

        def process_weights_after_loading(self, layer: Any) -> None:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            rows, columns = layer.weight.shape[0], 2 * layer.weight.shape[1]
            weight = unpack_fp4_from_uint8(layer.weight.data, rows, columns, dtype=torch.float32)
            scale = layer.weight_scale.data
            scale = 2.0 ** (scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
            scale = scale * getattr(layer, "weight_global_scale", torch.ones(()))
            layer.plain = weight * scale.repeat_interleave(columns // scale.shape[1], 1)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            given = getattr(layer, "input_global_scale_inv", None)
            return torch.nn.functional.linear(quantize(x, given), layer.plain.to(x.dtype), bias)

    class PlainMxfp8Kernel(PlainFp4Kernel):
        def process_weights_after_loading(self, layer: Any) -> None:
            scale = 2.0 ** (layer.weight_scale.data.float() - 127)
            layer.plain = layer.weight.float() * scale.repeat_interleave(layer.weight.shape[1] // scale.shape[1], 1)

    linear._POSSIBLE_FP8_KERNELS[cpu] = [PlainFp8Kernel]
    linear._POSSIBLE_WFP8A16_KERNELS[cpu] = [PlainFp8WeightKernel]
    linear._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [PlainFp8BlockKernel]
    linear._POSSIBLE_KERNELS[cpu] = [PlainIntegerKernel]  # what the CPU has takes bfloat16, and leaves inputs alone
    for module, name, kernel in (
        (schemes.compressed_tensors_w4a4_nvfp4, "init_nvfp4_linear_kernel", PlainFp4Kernel),
        (schemes.compressed_tensors_w4a4_mxfp4, "init_mxfp4_linear_kernel", PlainFp4Kernel),
        (schemes.compressed_tensors_w8a8_mxfp8, "init_mxfp8_linear_kernel", PlainMxfp8Kernel),
    ):
        setattr(module, name, kernel)
    ops.scaled_fp8_quant = to_fp8
    # A Hopper card's scheme, which only asks for the card.
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    CompressedTensorsConfig._is_fp8_w4a8_sm90 = classmethod(lambda cls, *args: cls._is_fp8_w4a8(*args))


def _is_packed(group: dict[str, Any]) -> bool:
    weights = group["weights"] or {}
    return weights.get("type") == "int" and (weights["num_bits"] < 8 or not group.get("input_activations"))


def to_fp8(value: torch.Tensor, scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's operation, which its CPU build lacks: it brings the weights that are fused to one scale."""
    scale = value.float().abs().amax() / 448 if scale is None else scale
    return (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class Inputs:
    """Quantizes what a layer reads, as compressed-tensors does; nothing where nothing is to be quantized."""

    def __init__(self, args: dict[str, Any] | None) -> None:
        self.args = None if args is None else QuantizationArgs.model_validate(args)

    def __call__(self, x: torch.Tensor, global_scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.args is None:
            return x
        whole = x.float()[None]
        scale, zero = compute_dynamic_scales_and_zp(whole, self.args, torch.nn.Module(), global_scale)
        return fake_quantize(whole, scale, zero, self.args, global_scale=global_scale)[0].to(x.dtype)


# ---------------------------------------------------------------------- experts


class Loaded(Exception):
    """The experts are loaded; its argument says which of their tensors equal the checkpoint's."""


class Experts:
    """Compares what vLLM's loader put into fused experts with the checkpoint, and ends the run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def watch(self) -> None:
        import importlib

        package = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
        methods = importlib.import_module(f"{package}.compressed_tensors_moe").CompressedTensorsMoEMethod
        for name in (
            "wna16",
            "w8a8_fp8",
            "w8a8_int8",
            "w4a4_nvfp4",
            "w4a4_mxfp4",
            "w8a8_mxfp8",
            "w4a8_fp8",
            "w4a8_int8",
        ):
            module = importlib.import_module(f"{package}.compressed_tensors_moe_{name}")
            for each in [n for n in vars(module) if re.fullmatch(r"select_\w+_moe_backend", n)]:
                setattr(module, each, lambda *_, **__: (None, None))
        for method in methods.__subclasses__():
            method.process_weights_after_loading = lambda _, layer: self.compare(layer)

    def compare(self, layer: Any) -> None:
        from safetensors import safe_open

        stored: dict[str, torch.Tensor] = {}
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                stored |= {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
        found = {}
        for key, value in layer.named_parameters(recurse=False):
            part, _, suffix = key.partition("_")
            names = {"w13": (("gate_proj", "w1"), ("up_proj", "w3")), "w2": (("down_proj", "w2"),)}.get(part)
            if names is None or not value.numel() or suffix == "weight_shape":  # of a part; the whole has its own
                continue
            found[key] = all(self._is_stored(stored, value, names, suffix, expert) for expert in range(len(value)))
        raise Loaded(found)

    @staticmethod
    def _is_stored(stored: dict[str, torch.Tensor], value: torch.Tensor, names: Any, suffix: str, expert: int) -> bool:
        def own(name: str) -> list[torch.Tensor]:
            end = f"experts.{expert}.{name}.{suffix}"
            return [tensor for key, tensor in sorted(stored.items()) if key.endswith(end)]

        wanted = [next(filter(None, map(own, pair)), []) for pair in names]
        got = value[expert].detach()
        for layers in zip(*wanted, strict=True):  # the first layer that fits: vLLM does not say which one this is
            parts = [each.reshape(-1) for each in layers]
            if got.numel() == 1:  # one scale for what gate and up read
                parts = parts[:1] if all(torch.equal(parts[0], each) for each in parts) else parts
            whole = torch.cat(parts).float()
            if whole.numel() == got.numel() and torch.equal(whole, got.reshape(-1).float()):
                return True
            turned = got.t().reshape(-1).float() if got.ndim == 2 else None  # packed weights are kept transposed
            if turned is not None and whole.numel() == turned.numel() and torch.equal(whole, turned):
                return True
        return False


if __name__ == "__main__":
    main()
