"""What observes and what quantizes may begin and end in any order; torch.compile's stance is then what it was."""

import itertools

import pytest
import torch

from lightning_obs import CalibrationSession, quantized

ORDERS = [  # of two blocks, each begins before it ends
    order
    for order in set(itertools.permutations(["session", "session", "quantized", "quantized"]))
    if order[0] != order[1]
]


@pytest.mark.parametrize("order", sorted(ORDERS), ids="-".join)
@pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
def test_the_stance_is_restored_in_whatever_order_blocks_end(order, stance, mlp):
    with CalibrationSession(mlp, "W8A8"):
        pass
    session, block = CalibrationSession(mlp, "INT8_STATIC"), quantized(mlp)
    end = {"session": session.detach, "quantized": lambda: block.__exit__(None, None, None)}
    steps = {"session": session.attach, "quantized": block.__enter__}
    with torch.compiler.set_stance(stance):
        for place, name in enumerate(order):
            steps[name]()
            steps[name] = end[name]
            now = torch._dynamo.eval_frame._stance.stance
            assert now == (stance if place == 3 else "force_eager")


def test_a_compiled_model_is_compiled_again_after_blocks_that_ended_out_of_order(mlp):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled, x = torch.compile(mlp, backend=count), torch.randn(5, 16)
    session = CalibrationSession(mlp, "INT8_STATIC")
    with session:
        mlp(x)
    session.attach()
    with quantized(mlp):
        session.detach()
        compiled(x)
        assert graphs == []
    compiled(x)
    assert len(graphs) == 1
