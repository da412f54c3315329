"""fairseq_rope/patches/linear.py: the results of torch's layer, with products of few different sizes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_rope.modules.overrides import is_plain_linear
from fairseq_rope.patches.linear import Linear, replace_linear_layers, with_few_sizes

SHAPES = [(1, 24), (16, 24), (17, 24), (3, 5, 24), (61, 9, 24), (0, 3, 24)]


def linear(bias=True, dtype=torch.bfloat16):
    torch.manual_seed(1)
    return nn.Linear(24, 40, bias=bias).to(dtype)


def as_replaced(layer):
    holder = nn.Sequential(copy.deepcopy(layer))
    replace_linear_layers(holder)
    return holder[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_the_exact_product(shape, bias, dtype):
    layer = linear(bias, dtype)
    replaced = as_replaced(layer)
    assert type(replaced) is Linear and is_plain_linear(replaced)
    x = torch.randn(shape).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], 40).to(dtype)
    out = replaced(x)
    out.mul_(1)  # as the scaling of queries in fairseq's attention
    out.backward(grad)
    exact_x, weight, exact_grad = x.detach().double(), layer.weight.double(), grad.double()
    expected = exact_x @ weight.t() + (layer.bias.double() if bias else 0)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(x.grad.double(), exact_grad @ weight, **tolerance)
    rows, of_rows = exact_x.reshape(-1, 24), exact_grad.reshape(-1, 40)
    wide = {**tolerance, "atol": tolerance["atol"] * 10}  # sums over the rows
    torch.testing.assert_close(replaced.weight.grad.double(), of_rows.t() @ rows, **wide)
    if bias:
        torch.testing.assert_close(replaced.bias.grad.double(), of_rows.sum(0), **wide)


def test_the_gradient_can_be_differentiated():
    layer = as_replaced(linear())
    x = torch.randn(17, 24).bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    grad.float().sum().backward()
    weight = layer.weight.detach().double()
    expected = 2 * (weight.t() @ weight).sum(0)  # of sum(2 W'W x) by each row x
    torch.testing.assert_close(x.grad.double(), expected.expand(17, 24), rtol=0.05, atol=0.05)


def test_each_product_has_the_gradients_of_its_own_weight():
    """fairseq's quant noise replaces weight.data before each product."""
    layer, x = as_replaced(linear(bias=False)), torch.randn(17, 24).bfloat16().requires_grad_()
    first = layer(x)
    expected = layer.weight.detach().double().sum(0).expand(17, 24)
    layer.weight.data = layer.weight * 2
    layer(x)
    first.sum().backward()
    torch.testing.assert_close(x.grad.double(), expected, rtol=0.05, atol=0.05)


def test_autocast_to_bfloat16_trains_weights_in_float32():
    layer = as_replaced(linear(dtype=torch.float32))
    x = torch.randn(17, 24).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x.bfloat16())
    out.sum().backward()
    expected = x.detach().bfloat16().double().sum(0).expand(40, 24)
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=0.05, atol=0.05)


def test_numbers_of_rows_grow_by_at_most_an_eighth_and_are_few():
    sizes = [with_few_sizes(rows) for rows in range(1, 4097)]
    for rows, size in enumerate(sizes, start=1):
        assert rows <= size < max(rows + 16, 1.125 * rows) and with_few_sizes(size) == size
    assert len({*sizes}) < 50
    assert with_few_sizes(0) == 0


class Sizes(TorchDispatchMode):
    """The context that notes the sizes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.noted = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.noted.add(tuple(tuple(arg.shape) for arg in args[-2:]))
        return operation(*args, **(kwargs or {}))


def test_products_of_many_batches_have_few_sizes():
    def sizes(layer):
        with Sizes() as context:
            for rows in range(1, 65):
                layer(torch.randn(rows, 24).bfloat16().requires_grad_()).sum().backward()
        return len(context.noted)

    assert sizes(linear()) > 185  # of the output, of the gradients of the input and of the weight
    assert sizes(as_replaced(linear())) <= 3 * 8


def test_only_plain_layers_are_replaced():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"own": Own(2, 3), "plain": nn.Linear(2, 3), "out": nn.Embedding(3, 2)})
    names = [*model.state_dict()]
    replace_linear_layers(model)
    assert [type(module) for module in model.values()] == [Own, Linear, nn.Embedding]
    assert [*model.state_dict()] == names
