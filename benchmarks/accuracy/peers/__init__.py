"""Other packages that quantize weights, beside ours: ``accuracy.py --peers``.

``peer.py`` says what a peer is; each package has a file. A row is a name here; a package that is not installed has no
rows.
"""

from peers.auto_round import AutoRound
from peers.llm_compressor import Modifier
from peers.modelopt import ModelOptimizer
from peers.peer import CannotQuantizeError, Peer

__all__ = ["PEERS", "CannotQuantizeError", "Peer"]

#: each package at its defaults, and with each documented option that is said to lose less
PEERS: dict[str, Peer] = {
    "GPTQModifier": Modifier("GPTQModifier"),
    "GPTQModifier(actorder=None)": Modifier("GPTQModifier", options={"actorder": None}),
    "GPTQModifier, memoryless_mse": Modifier("GPTQModifier", "memoryless_mse"),
    "GPTQModifier, imatrix_mse": Modifier("GPTQModifier", "imatrix_mse"),
    "GPTQModifier(dampening_frac=0.001), memoryless_mse": Modifier(
        "GPTQModifier", "memoryless_mse", {"dampening_frac": 0.001}
    ),
    "GPTQModifier(dampening_frac=0.1), memoryless_mse": Modifier(
        "GPTQModifier", "memoryless_mse", {"dampening_frac": 0.1}
    ),
    "AWQModifier": Modifier("AWQModifier"),
    "AWQModifier, memoryless_mse": Modifier("AWQModifier", "memoryless_mse"),
    "auto-round light": AutoRound(50, options={"lr": 5e-3}),
    "auto-round": AutoRound(200),
    "auto-round batch_size=4": AutoRound(200, batch_size=4),
    "auto-round enable_alg_ext": AutoRound(200, options={"enable_alg_ext": True}),
    "auto-round best": AutoRound(1000),
    "modelopt awq_lite": ModelOptimizer("awq_lite"),
    "modelopt awq_full": ModelOptimizer("awq_full"),
    "modelopt local_hessian": ModelOptimizer("local_hessian"),
    "modelopt gptq": ModelOptimizer("gptq"),
}
