"""fmp.df11.decode_ahead: the same bits, decoded in a thread before they are asked for."""

import contextvars
import gc
import os
import threading
import time
import tracemalloc
import weakref
from typing import Any

import pytest
import torch

import fmp
from fmp.df11 import CompressedTensor, FrozenWeight, decode_ahead
from fmp.df11_codec import codec
from tests.bits import same_bits
from tests.df11.frozen_blocks import BASE, FREED, FROZEN, GRADIENTS, LORA, PLAIN, X

NODES = [CompressedTensor.compress(torch.randn(40, 50).bfloat16()) for _ in range(6)]
VALUES = [node.decompress() for node in NODES]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes in which threads weights are decoded."""
    found: list[str] = []

    def decode(*args: Any, **kwargs: Any) -> Any:
        found.append(threading.current_thread().name)
        return decoded(*args, **kwargs)

    decoded = codec.decode
    monkeypatch.setattr(codec, "decode", decode)
    return found


def until_idle(places: list[str], count: int) -> None:
    """Waits until as many weights were decoded: as an operator would that takes long."""
    limit = time.monotonic() + 20
    while len(places) < count:
        assert time.monotonic() < limit, f"{len(places)} weights were decoded, not {count}"
        time.sleep(0.001)


def by_thread(places: list[str]) -> list[bool]:
    return [name.startswith("fmp-df11") for name in places]


@pytest.mark.parametrize("tensors", [1, 3, 50])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_same_gradients(gradient, tensors):
    want = GRADIENTS[gradient](PLAIN)(LORA, BASE, X)
    with decode_ahead(tensors):
        for _ in range(3):
            assert same_bits(GRADIENTS[gradient](FREED)(LORA, FROZEN, X), want)
    assert same_bits(GRADIENTS[gradient](FREED)(LORA, FROZEN, X), want)


def test_the_next_weight_is_decoded_while_this_one_is_used(places):
    with decode_ahead():
        for node in NODES:
            node.decompress()
        assert by_thread(places) == [False] * 6
        places.clear()
        # The order is known from here on, that from the last one to the first after this.
        for done, (node, values) in enumerate(zip(NODES, VALUES, strict=True)):
            assert same_bits(node.decompress(), values)
            if 0 < done < 5:
                until_idle(places, done + 2)
    assert not by_thread(places)[0]
    assert sum(by_thread(places[:6])) >= 4  # the second one is decoded by whoever comes first


def test_a_step_that_goes_forward_and_back(places):
    there_and_back = [0, 1, 2, 2, 1, 0]
    with decode_ahead(2):
        for step in range(4):
            for index in there_and_back:
                assert same_bits(NODES[index].decompress(), VALUES[index])
                if step == 3:
                    time.sleep(0.02)
    assert sum(by_thread(places[-6:])) >= 4


def test_tied_weights_and_any_order():
    generator = torch.Generator().manual_seed(2)
    with decode_ahead(3):
        for index in torch.randint(0, 6, (200,), generator=generator).tolist():
            got = NODES[index].decompress()
            assert same_bits(got, VALUES[index])
            got.zero_()  # nobody else has it


def test_inside_of_compiled_functions_and_wrapped_modules(places):
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).bfloat16()
    small, x = fmp.df11.wrap(module), torch.randn(2, 64).bfloat16()
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    with decode_ahead():
        for _ in range(3):
            for each in (small, compiled):
                assert same_bits(each(x), module(x))
                time.sleep(0.02)
    assert any(by_thread(places))


def test_parts_that_were_written_to_are_decoded_again(places):
    old, new = [torch.full((64, 64), value).bfloat16() for value in (1.0, 3.0)]
    node, other, next_one = CompressedTensor.compress(old), CompressedTensor.compress(new), NODES[0]
    with decode_ahead():
        for _ in range(2):
            next_one.decompress()
            node.decompress()
        next_one.decompress()
        until_idle(places, 6)
        fmp.tree.map(lambda part, source: part.copy_(source), node, other)
        assert same_bits(node.decompress(), new)


def test_what_is_not_used_any_more_is_let_go():
    with decode_ahead(2):
        node = CompressedTensor.compress(torch.randn(40, 50).bfloat16())
        node.decompress()
        gone = weakref.ref(node.sign_mantissa)
        del node
        for _ in range(40):
            NODES[1].decompress()
            NODES[2].decompress()
        gc.collect()
        assert gone() is None


def test_weights_that_change_all_the_time_leave_nothing_behind():
    def use(sizes: range) -> int:
        for size in sizes:  # no two are alike, even if they lie in the same place
            CompressedTensor.compress(torch.full((40, size), 0.5).bfloat16()).decompress()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with decode_ahead(2):
            before = use(range(50, 150))
            assert use(range(150, 450)) < before + 60_000  # 200 bytes a weight
    finally:
        tracemalloc.stop()


def test_wrong_guesses_do_not_pile_up(decoded):
    generator = torch.Generator().manual_seed(3)
    with decode_ahead(2):
        for index in torch.randint(0, 6, (300,), generator=generator).tolist():
            NODES[index].decompress()
            assert decoded.live <= 3  # a guess that is given up may still be in the works
            if decoded.calls % 20 == 0:
                time.sleep(0.005)
    assert decoded.most > 1


def test_parts_that_two_weights_share_do_not_make_them_one():
    node = CompressedTensor.compress(torch.randn(64, 128).bfloat16())
    flat = fmp.tree.replace(node, shape=torch.Size([8192]))
    other = fmp.tree.replace(CompressedTensor.compress(VALUES[0]), sign_mantissa=NODES[1].sign_mantissa)
    with decode_ahead(2):
        for _ in range(3):
            assert node.decompress().shape == (64, 128)
            assert flat.decompress().shape == (8192,)
            NODES[1].decompress()
            got = other.decompress()
            assert not same_bits(got, VALUES[1])


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        weights = [FrozenWeight(CompressedTensor.compress(values)) for values in VALUES[:3]]
        with decode_ahead(2):
            for _ in range(4):
                for weight, values in zip(weights, VALUES, strict=False):
                    assert same_bits(weight * 1, values)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 warns of threads, rightly
def test_a_forked_process_decodes_by_itself():
    with decode_ahead(2):
        for _ in range(3):
            for node in NODES:
                node.decompress()
        child = os.fork()
        if child == 0:
            right = all(same_bits(node.decompress(), values) for node, values in zip(NODES, VALUES, strict=True))
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_contexts_that_end_in_another_order():
    def use() -> list[torch.Tensor]:
        first, second = decode_ahead(), decode_ahead()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        NODES[0].decompress()
        second.__exit__(None, None, None)
        return [NODES[0].decompress() for _ in range(3)]

    # What is left over by them is left over in this context alone.
    assert all(same_bits(found, VALUES[0]) for found in contextvars.copy_context().run(use))


def test_damage_is_found_by_the_one_who_asks():
    damaged = CompressedTensor.compress(torch.randn(40, 50).bfloat16())
    with decode_ahead():
        for _ in range(2):
            NODES[0].decompress()
            damaged.decompress()
        NODES[0].decompress()
        damaged.chunk_bits.add_(1)
        for _ in range(3):
            NODES[0].decompress()
            time.sleep(0.01)
            with pytest.raises(ValueError, match="corrupt"):
                damaged.decompress()


def test_the_thread_ends_with_the_context():
    def helpers() -> int:
        return sum(thread.name.startswith("fmp-df11") for thread in threading.enumerate())

    assert helpers() == 0
    with decode_ahead(), decode_ahead():
        for _ in range(3):
            NODES[0].decompress()
        assert helpers() == 1  # of the inner one
    assert helpers() == 0
    with pytest.raises(ValueError, match="vmap"), decode_ahead(5):
        torch.func.vmap(lambda nodes: [node.decompress() for node in NODES * 2 + nodes])([NODES[0]])
    assert helpers() == 0


def test_autograd_asks_in_the_same_thread(places):
    weights = [FrozenWeight(node) for node in NODES]
    x = torch.randn(2, 50).bfloat16().requires_grad_()

    def loss(weights: list[Any]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.linear(x, weight).float().square().sum() for weight in weights]).sum()

    (want,) = torch.autograd.grad(loss(VALUES), x)
    with decode_ahead():
        for _ in range(4):
            assert same_bits(torch.autograd.grad(loss(weights), x)[0], want)
    assert len(places) >= 4 * 2 * len(NODES)


@pytest.mark.parametrize(
    ("tensors", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)]
)
def test_refused(tensors, error):
    with pytest.raises(error, match="tensors must be"), decode_ahead(tensors):
        pass
