import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fmp import random

SEEDS = [0, 1, 2, -1, 1 << 32, int(random.fold_in(0, 0)), int(random.fold_in(0, 1))]
WORDS = 1 << 17
int64 = st.integers(-(2**63), 2**63 - 1)


def words_of(seed: int, count: int = WORDS) -> torch.Tensor:
    return random.bits(seed, (count,))


def z_of_bits(words: torch.Tensor) -> float:
    """The largest deviation of a bit's mean from 1/2, in standard errors."""
    means = torch.stack([(words >> place & 1).double().mean() for place in range(32)])
    return float((means - 0.5).abs().max() * 2 * math.sqrt(words.numel()))


def correlation_z(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].abs() * math.sqrt(a.numel()))


def chi_square_z(bins: torch.Tensor, count: int) -> float:
    expected = bins.numel() / count
    chi = ((torch.bincount(bins, minlength=count).double() - expected) ** 2 / expected).sum()
    return float((chi - (count - 1)) / math.sqrt(2 * (count - 1)))


def lowbias32(word: int) -> int:
    word ^= word >> 16
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 15
    word = word * 0x846CA68B % 2**32
    return word ^ word >> 16


def reference(seed: int, index: int) -> int:
    low, high = seed % 2**32, (seed >> 32) % 2**32
    inner = lowbias32(index % 2**32 ^ (high + 1) * 0x9E3779B9 % 2**32)
    return lowbias32(inner ^ low ^ (index >> 32) * 0x9E3779B9 % 2**32)


@given(int64, st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_words_are_those_of_unsigned_arithmetic(seed: int, indices: list[int]) -> None:
    assert random.bits_at(seed, torch.tensor(indices)).tolist() == [reference(seed, index) for index in indices]


@given(int64, st.integers(0, 70))
def test_words_of_a_tensor_are_those_of_its_indices(seed: int, size: int) -> None:
    assert random.bits(seed, (size,)).tolist() == [reference(seed, index) for index in range(size)]


@given(int64, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_a_shard_gets_its_part_of_the_whole(seed: int, rows: int, columns: int, high: int, wide: int) -> None:
    whole = random.bits(seed, (rows * high, columns * wide))
    index = torch.arange(whole.numel()).reshape(whole.shape)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide))
            assert torch.equal(random.bits_at(seed, index[part]), whole[part])


def test_no_two_blocks_of_2_to_the_32_are_alike() -> None:
    index = torch.arange(WORDS)
    first = random.bits_at(3, index)
    for block in (1, 2, 1 << 20, 1 << 30):
        later = random.bits_at(3, index + (block << 32))
        assert correlation_z(first, later) < 5
        assert z_of_bits(first ^ later) < 5
    assert z_of_bits(random.bits_at(3, index << 32)) < 5


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_uniform_and_independent_along_a_tensor(seed: int) -> None:
    words = words_of(seed)
    assert z_of_bits(words) < 5
    for shift in (24, 12, 0):
        assert abs(chi_square_z(words >> shift & 255, 256)) < 5
    for lag in [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        15,
        16,
        17,
        63,
        64,
        65,
        100,
        127,
        128,
        255,
        256,
        257,
        768,
        1000,
        1024,
        4096,
        65536,
    ]:
        assert correlation_z(words[:-lag], words[lag:]) < 5
        assert z_of_bits(words[:-lag] ^ words[lag:]) < 5


@pytest.mark.parametrize("seed", [0, 5, int(random.fold_in(3, 3))])
def test_seeds_that_differ_in_one_bit_are_unrelated(seed: int) -> None:
    words = words_of(seed)
    for place in range(64):
        other = words_of(seed ^ (1 << place if place < 63 else -(1 << 63)))
        assert correlation_z(words, other) < 5
        assert z_of_bits(words ^ other) < 5
        assert abs(chi_square_z((words >> 28) * 16 + (other >> 28), 256)) < 5


def test_consecutive_seeds_are_unrelated_even_when_shifted() -> None:
    streams = torch.stack([words_of(seed, 1 << 14) for seed in range(16)]).double()
    spectra = torch.fft.fft(streams - streams.mean(1, keepdim=True))
    for a in range(16):
        for b in range(a):
            # All circular shifts of one stream against the other at once.
            shifts = torch.fft.ifft(spectra[a] * spectra[b].conj()).real
            z = shifts / (streams[a].std() * streams[b].std() * math.sqrt(1 << 14))
            assert float(z.abs().max()) < 6


def test_one_place_is_uniform_over_seeds() -> None:
    seeds = torch.arange(-10_000, 10_000)
    masks = torch.func.vmap(lambda seed: random.keep_mask(seed, (64,), 0.3))(seeds)
    z = (masks.double().mean(0) - 0.7) / math.sqrt(0.21 / len(seeds))
    assert float(z.abs().max()) < 5
    assert 0.6 < float(z.std()) < 1.4


@given(int64, int64)
def test_fold_in_takes_numbers_and_tensors_alike(seed: int, data: int) -> None:
    folded = random.fold_in(seed, data)
    assert folded.dtype == torch.int64
    assert folded.shape == ()
    for other in (
        random.fold_in(torch.tensor(seed), data),
        random.fold_in(seed, torch.tensor(data)),
        random.fold_in(torch.tensor([seed]), torch.tensor([[data]]))[0, 0],
    ):
        assert torch.equal(folded, other)


def test_fold_in_of_an_int32_step_is_that_of_its_value() -> None:
    assert torch.equal(random.fold_in(5, torch.tensor(3, dtype=torch.int32)), random.fold_in(5, 3))


def test_fold_in_does_not_repeat() -> None:
    seeds, data = torch.arange(-20, 20), torch.arange(-5_000, 5_000)
    folded = random.fold_in(seeds[:, None], data)
    # In 32 bits, about 19 of these 400,000 would be alike.
    assert folded.unique().numel() == folded.numel()
    chains = random.fold_in(random.fold_in(0, torch.arange(300))[:, None], torch.arange(300))
    assert torch.cat([chains.flatten(), folded.flatten()]).unique().numel() == chains.numel() + folded.numel()


@pytest.mark.parametrize("argument", ["seed", "data"])
def test_fold_in_changes_half_of_the_bits(argument: str) -> None:
    numbers = torch.arange(4096)

    def fold(numbers: torch.Tensor) -> torch.Tensor:
        return random.fold_in(numbers, 7) if argument == "seed" else random.fold_in(7, numbers)

    for place in range(64):
        changed = fold(numbers) ^ fold(numbers ^ (1 << place if place < 63 else -(1 << 63)))
        flips = torch.stack([(changed >> bit & 1).double().mean() for bit in range(64)])
        assert float((flips - 0.5).abs().max()) * 2 * 64 < 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_stays_below_one_and_uses_all_digits(dtype: torch.dtype) -> None:
    numbers = random.uniform(1, (WORDS,), dtype=dtype)
    assert numbers.dtype == dtype
    numbers = numbers.double()
    assert 0.0 <= float(numbers.min()) < 1e-3
    eps = torch.finfo(dtype).eps
    assert 1 - max(4 * eps, 1e-4) < float(numbers.max()) < 1
    # Truncation to digits lowers the mean by half a digit.
    assert float(numbers.mean()) == pytest.approx(0.5 - eps / 4, abs=5 * math.sqrt(1 / 12 / WORDS))


def largest_gap(numbers: torch.Tensor, distribution: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The Kolmogorov-Smirnov statistic, in units in which 1.95 is passed once in a thousand."""
    expected = distribution(numbers.double().sort().values)
    steps = torch.arange(numbers.numel() + 1, dtype=torch.float64) / numbers.numel()
    return float(torch.maximum((expected - steps[:-1]).abs(), (steps[1:] - expected).abs()).max()) * math.sqrt(
        numbers.numel()
    )


def test_distributions_are_what_they_are_called() -> None:
    assert largest_gap(random.uniform(2, (WORDS,)), lambda x: x) < 1.95
    assert largest_gap(random.normal(2, (WORDS,)), torch.special.ndtr) < 1.95
    assert largest_gap(random.exponential(2, (WORDS,)), lambda x: -torch.expm1(-x)) < 1.95
    assert float(random.exponential(2, (WORDS,)).min()) > 0
    assert random.normal(2, (3,), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert random.exponential(2, (3,), dtype=torch.float64).dtype == torch.float64


@given(int64, st.floats(0, 1))
def test_mask_drops_at_the_rate(seed: int, p: float) -> None:
    mask = random.keep_mask(seed, (100, 200), p)
    assert mask.dtype == torch.bool
    assert abs(float(mask.double().mean()) - (1 - p)) <= 6 * math.sqrt(p * (1 - p) / mask.numel())


@given(int64)
def test_mask_at_the_ends(seed: int) -> None:
    assert random.keep_mask(seed, (1000,), 0.0).all()
    for p in (1.0, math.nextafter(1.0, 0.0), 1 - 2**-34):
        assert not random.keep_mask(seed, (1000,), p).any()


def test_mask_is_the_words_as_signed_numbers_against_a_threshold() -> None:
    signed = words_of(9) - (words_of(9) >> 31 << 32)
    for p in (2**-32, 0.1, 0.5, 1 - 2**-32):
        assert torch.equal(random.keep_mask(9, (WORDS,), p), signed + 2**31 >= round(p * 2**32))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert random.bits(0, shape).shape == shape
    assert random.uniform(0, torch.Size(shape)).shape == shape
    assert random.keep_mask(0, list(shape), 1.0).shape == shape


NOISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bits": lambda seed: random.bits(seed, (3, 5)),
    "uniform": lambda seed: random.uniform(seed, (3, 5)),
    "normal": lambda seed: random.normal(seed, (3, 5)),
    "exponential": lambda seed: random.exponential(seed, (3, 5)),
    "mask": lambda seed: random.keep_mask(seed, (3, 5), 0.4),
    "fold_in": lambda seed: random.fold_in(random.fold_in(seed, 2), torch.arange(3)),
}


@pytest.mark.parametrize("name", NOISE)
def test_vmap_over_seeds_is_a_loop(name: str) -> None:
    seeds = torch.tensor([3, -1, 1 << 40])
    assert torch.equal(torch.func.vmap(NOISE[name])(seeds), torch.stack([NOISE[name](seed) for seed in seeds]))


def test_one_seed_gives_every_member_the_same_mask() -> None:
    x = torch.ones(4, 50)
    dropped = torch.func.vmap(lambda row: torch.where(random.keep_mask(1, row.shape, 0.5), row, 0.0))(x)
    assert torch.equal(dropped, dropped[:1].expand(4, 50))
    assert 0 < float(dropped.sum()) < 200


def test_gradients_and_tangents_see_constants() -> None:
    def noisy(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return (random.normal(seed, x.shape) * x).sum()

    x, seed = torch.randn(6), torch.tensor(4)
    noise = random.normal(4, (6,))
    assert torch.equal(torch.func.grad(noisy)(x, seed), noise)
    assert torch.allclose(torch.func.jvp(lambda x: noisy(x, seed), (x,), (torch.ones(6),))[1], noise.sum())
    per_seed = torch.func.vmap(torch.func.grad(noisy), (None, 0))(x, torch.arange(3))
    assert torch.equal(per_seed, torch.stack([random.normal(seed, (6,)) for seed in range(3)]))


def test_compiled_noise_is_the_same_and_new_seeds_do_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def everything(seed: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: make(seed) for name, make in NOISE.items()}

    compiled = torch.compile(everything, backend=counter, fullgraph=True)
    for seed in map(torch.tensor, [0, 1, -5, 1 << 40]):
        expected, found = everything(seed), compiled(seed)
        assert all(torch.equal(expected[name], found[name]) for name in NOISE)
    assert counter.frame_count == 1


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for make in NOISE.values():
        make(torch.tensor(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_made_where_it_is_asked_for() -> None:
    assert random.uniform(0, (2,), device="meta").device.type == "meta"
    assert random.keep_mask(torch.tensor(0), (2,), 1.0, device="meta").device.type == "meta"
    assert random.fold_in(0, torch.tensor(1, device="meta")).device.type == "meta"
    assert random.as_seed(3, "meta").device.type == "meta"


@pytest.mark.parametrize("seed", [1.5, True, None, "0", torch.tensor(1.0), torch.tensor(True)])
def test_seeds_are_integers(seed: object) -> None:
    for call in (
        lambda: random.bits(seed, (2,)),  # pyright: ignore[reportArgumentType]
        lambda: random.fold_in(seed, 0),  # pyright: ignore[reportArgumentType]
        lambda: random.as_seed(seed),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(TypeError, match="seed must"):
            call()
    with pytest.raises(TypeError, match="data must"):
        random.fold_in(0, seed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1])
def test_seeds_take_64_bits(seed: int) -> None:
    for call in (lambda: random.bits(seed, (2,)), lambda: random.fold_in(seed, 0), lambda: random.as_seed(seed)):
        with pytest.raises(ValueError, match=rf"seed must be from -2\^63 to 2\^63 - 1, got {seed}"):
            call()
    with pytest.raises(ValueError, match="data must be from"):
        random.fold_in(0, seed)
    assert random.as_seed(2**63 - 1) == 2**63 - 1
    assert random.as_seed(-(2**63)) == -(2**63)


def test_compiled_seeds_are_checked_too() -> None:
    compiled = torch.compile(lambda seed: random.bits(seed, (2,)), backend="eager", fullgraph=True)
    for seed in (3, 4, 5, -(2**63), 2**63 - 1):
        assert torch.equal(compiled(seed), random.bits(seed, (2,)))


def test_seeds_have_no_dimensions() -> None:
    with pytest.raises(ValueError, match=r"seed must be a scalar, got i64\[2\].*vmap"):
        random.bits(torch.tensor([1, 2]), (2,))
    with pytest.raises(TypeError, match=r"index must hold integers, got f32\[2\]"):
        random.bits_at(0, torch.ones(2))


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_rates_are_probabilities(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1, got"):
        random.keep_mask(0, (2,), p)


def test_a_part_of_a_batch_gets_the_words_of_its_rows():
    whole, child = random.uniform(5, (6, 3)), random.fold_in(1, 2)
    words = random.bits(5, (8,))
    for index, rows in enumerate(whole.chunk(3)):
        with random.part_of_batch(index):
            assert torch.equal(random.uniform(5, (2, 3)), rows)
            with random.part_of_batch(0):
                assert torch.equal(random.uniform(5, (6, 3)), whole)
            assert random.current_part() == index
            assert random.fold_in(1, 2) == child
            assert torch.equal(random.bits_at(5, torch.arange(8)), words)
    assert random.current_part() == 0


def test_a_part_of_a_batch_is_a_constant_of_the_compiled_graph():
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def draw(seed: torch.Tensor) -> torch.Tensor:
        with random.part_of_batch(2):
            inside = random.bits(seed, (4,))
        return torch.cat([random.bits(seed, (8,)), inside])

    for seed in (1, 2):
        assert torch.equal(draw(torch.tensor(seed)), random.bits(seed, (12,)))
    assert counter.frame_count == 1
