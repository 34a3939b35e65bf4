"""Steps with a closure, and steps that call the step of a base class: casting, overflow, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from fmp.compat import amp
from tests.bits import same_bits

INF = float("inf")
X = torch.ones(1, 2)


def start(*args: Any, **kwargs: Any) -> Any:
    return amp.initialize(*args, **{"verbosity": 0} | kwargs)


def ones() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def scaled_backward(loss: torch.Tensor, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()


def product() -> torch.dtype:
    return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


class Watching(torch.optim.SGD):
    """Runs its closure between two products, whose dtypes it keeps."""

    seen: list[torch.dtype]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = product()
        with torch.enable_grad():
            closure()
        self.seen = [before, product()]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_cast_and_what_the_step_does_around_it_is_not(by_name):
    model = nn.Linear(2, 2)
    optimizer = Watching(model.parameters(), lr=0.1)
    start(model, optimizer, opt_level="O1", half_dtype="bf16")
    for closure, low in [(product, True), (lambda: model(X).dtype, True), (lambda: None, False)]:
        seen = []
        wrapped = lambda closure=closure, seen=seen: seen.append(closure())
        optimizer.step(closure=wrapped) if by_name else optimizer.step(wrapped)
        assert seen == [torch.bfloat16 if low else None]
        assert optimizer.seen == [torch.float32, torch.float32]
        assert product() == torch.bfloat16


def test_casting_is_off_for_the_rest_of_a_step_whose_closure_raises():
    model = ones()
    optimizer = Watching(model.parameters(), lr=0.1)
    start(model, optimizer, opt_level="O1", half_dtype="bf16")
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step(lambda: None)
    assert optimizer.seen == [torch.float32, torch.float32]
    assert product() == torch.bfloat16


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_an_overflow_in_a_closure_skips_that_step(level, capsys):
    factors = [1.0, INF, 1.0, float("nan"), 1.0]
    model, plain = ones(), ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.25, momentum=0.5)
    start(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=16.0, verbosity=1)
    for factor in factors:

        def closure(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(X).sum() * factor
            scaled_backward(loss, optimizer)
            return loss

        returned: Any = optimizer.step(closure)
        assert returned.isfinite() == (factor == 1.0)
        assert model.weight.grad is not None  # as it was, after a skip, too
        if factor == 1.0:
            by_hand.zero_grad()
            plain(X).sum().backward()
            by_hand.step()
        assert torch.equal(model.weight.float(), plain.weight)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step") == 2


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_that_of_torch_but_for_the_rounding_of_the_scale(search):
    weights = []
    for scaled in (False, True):
        model = ones()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)
        if scaled:
            start(model, optimizer, opt_level="O0", loss_scale=1024.0)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, scaled: bool = scaled) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.tensor([[1.0, 2.0], [3.0, 1.0]])) - 1.0).square().sum()
            scaled_backward(loss, optimizer) if scaled else loss.backward()
            return loss.detach()

        for _ in range(3):
            optimizer.step(closure)
        weights.append(model.weight.detach())
    assert same_bits(weights[0], weights[1])


def test_lbfgs_ends_its_step_at_an_overflow():
    model = ones()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    start(model, optimizer, opt_level="O0", loss_scale="dynamic")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum() * INF
        scaled_backward(loss, optimizer)
        return loss.detach()

    optimizer.step(closure)
    assert torch.equal(model.weight, torch.ones(1, 2))


def test_gradients_that_a_closure_leaves_scaled_are_refused():
    model = ones()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.25)
    start(model, optimizer, opt_level="O0", loss_scale=8.0)
    with pytest.raises(RuntimeError, match="still scaled"):
        optimizer.step(lambda: scaled_backward(model(X).sum(), optimizer, delay_unscale=True))
    assert torch.equal(model.weight, torch.ones(1, 2))


class Twice(torch.optim.SGD):
    """Takes the step of SGD, and then another one by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result: Any = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad)
        return result


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_that_calls_that_of_its_base_class_uses_gradients_before_and_after(level, hooked):
    if hooked:  # an instance of the base class has torch call hooks around its step as well
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model = ones()
    optimizer = Twice(model.parameters(), lr=0.25)
    start(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=16.0)
    for factor, weight in [(1.0, 0.5), (INF, 0.5), (1.0, 0.0)]:
        optimizer.zero_grad()
        scaled_backward(model(X).sum() * factor, optimizer)
        optimizer.step()
        assert torch.equal(model.weight.float(), torch.full((1, 2), weight))


def test_a_closure_of_a_step_that_calls_its_base_class_is_cast_once_around():
    model = ones()
    optimizer: Any = Twice(model.parameters(), lr=0.25)
    start(model, optimizer, opt_level="O1", half_dtype="bf16", loss_scale=8.0)
    seen = []

    def closure() -> None:
        seen.append(product())
        scaled_backward(model(X).sum(), optimizer)

    optimizer.step(closure)
    assert seen == [torch.bfloat16]
    assert torch.equal(model.weight, torch.full((1, 2), 0.5))
    assert product() == torch.bfloat16


class Failing(torch.optim.SGD):
    fails = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result: Any = super().step(closure)
        if self.fails:
            raise ArithmeticError
        return result


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_of_a_skip_that_raised_do_not_come_back_after_they_were_cleared(level):
    model = ones()
    optimizer = Failing(model.parameters(), lr=0.25)
    start(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=16.0)
    scaled_backward(model(X).sum() * INF, optimizer)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.fails = False
    weights = []
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(model(X).sum(), optimizer)
        optimizer.step()
        weights.append(model.weight[0, 0].item())
    assert weights == [1.0, 0.75, 0.5]  # the skip that raised is made up for first


def test_the_model_has_what_a_base_class_has_done_before_a_step_raised():
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # has torch call hooks around the step of the base class
    model = ones()
    optimizer = Failing(model.parameters(), lr=0.25)
    start(model, optimizer, opt_level="O2", loss_scale=8.0)
    scaled_backward(model(X).sum(), optimizer)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((1, 2), 0.75))
