import pytest
import torch

from tests.bits import same_bits

ONE = torch.tensor([1.5])
VIEWS = {
    "stride 0": lambda x: x.as_strided((1,), (0,)),
    "stride 2": lambda x: x.as_strided((1,), (2,)),
    "expanded": lambda x: x[0].expand(1),
    "column": lambda x: x.expand(3, 1).T[:, :1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_one_element_of_any_stride_is_compared(name):
    assert same_bits(VIEWS[name](ONE), VIEWS[name](ONE.clone()))
    assert not same_bits(VIEWS[name](ONE), VIEWS[name](-ONE))


def test_lazy_conjugates_are_compared():
    number = torch.tensor([1.0 + 2.0j])
    assert same_bits(number.conj(), torch.tensor([1.0 - 2.0j]))
    assert not same_bits(number.conj(), number)


def test_bits_are_compared_and_not_values():
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.zeros(0).as_strided((0,), (0,)), torch.zeros(0))
