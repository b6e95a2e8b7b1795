"""The divergence of predictions, against its definition in float64."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_obs import CalibrationError
from lightning_obs.numerics.divergence import HeadLogits, compare, divergence

#: of one block, of several blocks of classes, of several blocks of rows, of both
SHAPES = [(3, 2), (2, 5, 2050), (3, 100, 7), (1, 300, 4100)]


def expected_divergence(student, teacher):
    """By torch's own operations; the gradient too."""
    log_q = student.double().log_softmax(-1)
    log_p = teacher.double().log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()


def a_pair(shape, dtype=torch.float32):
    student = (5 * torch.randn(shape)).to(dtype)
    teacher = (student.float() + torch.randn(shape)).to(dtype)
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_are_those_of_the_definition(shape, dtype):
    student, teacher = a_pair(shape, dtype)
    expected = expected_divergence(student, teacher)
    (expected_gradient,) = torch.autograd.grad(1000 * expected, student)
    actual = divergence(student, teacher)
    (gradient,) = torch.autograd.grad(1000 * actual, student)
    assert actual.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
    rtol = max(1e-4, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=1e-5 * float(expected_gradient.abs().max()))


@pytest.mark.parametrize("shape", [(2, 5, 2050), (3, 300, 7)], ids=str)
def test_tokens_that_do_not_count_have_no_part_and_no_gradient(shape):
    student, teacher = a_pair(shape)
    mask = torch.rand(shape[:-1]) < 0.6
    with torch.no_grad():
        student[~mask] = torch.nan
    expected = expected_divergence(student[mask], teacher[mask])
    (expected_gradient,) = torch.autograd.grad(expected, student)
    actual = divergence(student, teacher, mask.long())
    (gradient,) = torch.autograd.grad(actual, student)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-8)
    assert divergence(student, teacher, torch.zeros(shape[:-1])) == 0


def test_slices_and_logits_on_another_layout_are_read_as_they_are():
    student, teacher = a_pair((2, 6, 50))
    expected = expected_divergence(student[:, 1:], teacher[:, :-1])
    torch.testing.assert_close(divergence(student[:, 1:], teacher[:, :-1]).double(), expected, rtol=1e-5, atol=0)


def test_equal_predictions_diverge_by_nothing_also_where_a_class_is_excluded():
    student, _ = a_pair((2, 40, 3000))
    with torch.no_grad():
        student[..., 7] = -torch.inf
        student[..., 2048:] = -torch.inf  # a whole block
        student[..., :1] = -torch.inf
    same = student.detach().clone()
    value = divergence(student, same)
    assert value == 0
    (gradient,) = torch.autograd.grad(value, student)
    assert not gradient.any()
    value, agreeing = compare(same.flatten(0, 1), same.flatten(0, 1))
    assert (value, agreeing) == (0, 80)


def test_a_class_that_the_student_excludes_costs_much_and_no_nan():
    student = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    value = divergence(student, torch.zeros(1, 2))
    assert 1000 < value < 1e5
    assert torch.autograd.grad(value, student)[0].isfinite().all()


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_nan_is_seen(who):
    pair = dict(zip(["student", "teacher"], a_pair((4, 3000)), strict=True))
    with torch.no_grad():
        pair[who][1, 2500] = torch.nan
    assert divergence(**pair).isnan()


@pytest.mark.parametrize("bias", [True, False])
def test_a_teachers_head_gives_what_its_logits_give(bias):
    student, _ = a_pair((2, 200, 3000))
    hidden, weight = torch.randn(2, 200, 16), torch.randn(3000, 16)
    vector = torch.randn(3000) if bias else None
    whole = divergence(student, F.linear(hidden, weight, vector))
    by_head = divergence(student, HeadLogits(hidden, weight, vector))
    torch.testing.assert_close(by_head, whole, rtol=1e-5, atol=0)
    gradients = [torch.autograd.grad(value, student)[0] for value in (whole, by_head)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-8)


class _LargeTensors(TorchDispatchMode):
    """Keeps the storages of at least a size that operations make, and counts the columns of matrix products."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.storages = {}
        self.columns = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.nbytes() >= self.size:
                self.storages[storage.data_ptr()] = storage
            if func is torch.ops.aten.mm.default:
                self.columns += result.numel()
        return result


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_step_makes_one_tensor_of_the_logits_size_and_computes_the_teachers_logits_once(is_masked):
    student, _ = a_pair((1, 300, 4000))
    hidden, weight = torch.randn(1, 300, 16), torch.randn(4000, 16)
    mask = torch.ones(1, 300) if is_masked else None
    with _LargeTensors(student.nbytes) as large:
        value = divergence(student, HeadLogits(hidden, weight), mask)
        value.backward()
    assert student.grad is not None
    assert len({*large.storages} - {student.untyped_storage().data_ptr()}) == 1
    assert large.columns == student.numel()


def test_a_second_backward_has_the_same_gradient():
    student, teacher = a_pair((2, 200, 3000))
    value = divergence(student, teacher, torch.rand(2, 200) < 0.6)
    (first,) = torch.autograd.grad(2 * value, student, retain_graph=True)
    (second,) = torch.autograd.grad(value, student)
    assert first.any()
    torch.testing.assert_close(second * 2, first, rtol=1e-6, atol=0)


def test_small_gradients_in_float16_reach_a_loss_scaler():
    student = torch.zeros(2, 60_000, dtype=torch.float16, requires_grad=True)
    teacher = (0.01 * torch.randn(2, 60_000).sign()).half()
    (expected,) = torch.autograd.grad(65536 * expected_divergence(student, teacher), student)
    assert expected.abs().max() / 65536 * 2 < 2**-22  # a few steps of float16, without the scale
    (gradient,) = torch.autograd.grad(65536 * divergence(student, teacher), student)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=0)


def test_sums_are_in_float32_whatever_the_default_dtype():
    """Lightning makes bfloat16 the default while a step runs under precision="bf16-true"."""
    student, teacher = a_pair((2, 40, 300))
    expected = divergence(student, teacher)
    torch.set_default_dtype(torch.bfloat16)
    try:
        value = divergence(student, teacher)
    finally:
        torch.set_default_dtype(torch.float32)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)


def test_agreement_is_of_the_most_likely_class():
    student, teacher = a_pair((300, 4100))
    with torch.no_grad():
        student[0, 7] = teacher[0, 7 + 2048] = 100.0  # the same place in another block
    value, agreeing = compare(student, teacher)
    assert agreeing == (student.argmax(-1) == teacher.argmax(-1)).sum()
    torch.testing.assert_close(value / 300, expected_divergence(student, teacher), rtol=1e-5, atol=0)


def test_another_vocabulary_is_refused():
    with pytest.raises(CalibrationError, match=r"student \(1, 3\), teacher \(1, 4\).*student's vocabulary"):
        divergence(torch.zeros(1, 3), torch.zeros(1, 4))
