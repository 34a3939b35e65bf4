"""Who wrote which part of a memory, and where the inf and NaN in it came from."""

import torch
from hypothesis import given, strategies as st

from fmp.live_memory import Watch
from fmp.numerics.handing_on import Labels
from fmp.numerics.provenance import Provenance, Region

DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64, torch.complex64])


@st.composite
def views(draw):
    """Draws a view of a memory of 96 bytes."""
    dtype = draw(DTYPES)
    memory = torch.zeros(96, dtype=torch.uint8).view(dtype)
    start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    rows = draw(st.integers(0, 3))
    flat = memory[start::step]
    return flat if not rows else flat[: len(flat) // rows * rows].view(-1, rows)[:, draw(st.integers(0, rows - 1)) :]


def bytes_of(tensor):
    places = torch.arange(96 // tensor.itemsize).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {place * tensor.itemsize + byte for place in places.flatten().tolist() for byte in range(tensor.itemsize)}


@given(views(), views())
def test_regions_meet_where_they_share_bytes(a, b):
    one, other = Region.of(a), Region.of(b)
    shared = bytes_of(a) & bytes_of(b)
    assert one.meets(other) == other.meets(one) == bool(shared)
    if one.covers(other):
        assert bytes_of(b) <= bytes_of(a)
    if a.is_contiguous() and bytes_of(b) <= bytes_of(a):
        assert one.covers(other)


class Known:
    def __init__(self):
        self.watch = Watch()

    def __call__(self, storage):
        return self.watch._see(storage, is_new=False)


def test_parts_of_a_memory_have_origins_of_their_own():
    known, table = Provenance(Known()), torch.zeros(4, 6)
    left, right = table[:, :5], table[:, 5]
    assert known.origin(left) is None
    assert known.note(left, "left") == []
    assert known.note(right, "right") == []
    assert (known.origin(left), known.origin(right), known.origin(table[0])) == ("left", "right", "right")
    assert list(known.origins(table)) == ["right", "left"]
    assert known.note(table, "all") == ["left", "right"]
    assert list(known.origins(left)) == ["all"]


def test_labels_belong_to_places():
    known, table = Provenance(Known()), torch.zeros(2, 3)
    known.note(table[0], "a", torch.tensor([1, 0, 2], dtype=torch.int32))
    assert known.labels(table).tolist() == [[1, 0, 2], [0, 0, 0]]
    assert known.labels(table.t()[2]).tolist() == [2, 0]
    known.note(table[:, 0], "b")
    assert known.labels(table).tolist() == [[0, 0, 2], [0, 0, 0]]
    as_complex = torch.view_as_complex(torch.zeros(2, 2))
    known.note(torch.view_as_real(as_complex), "c", torch.tensor([[0, 3], [0, 0]], dtype=torch.int32))
    assert known.labels(as_complex).tolist() == [[0, 3], [0, 0]]
    assert known.labels(torch.view_as_real(as_complex).view(torch.float16))[0].tolist() == [0, 0, 3, 3]


def test_labels_of_sets_are_united_place_by_place():
    labels = Labels()
    one, two, both = labels.of([1]), labels.of([2]), labels.of([1, 2])
    a, b = torch.tensor([0, one, 0, one, both]), torch.tensor([0, 0, two, two, two])
    assert labels.union(a, b).tolist() == [0, one, two, both, both]
    assert labels.sources(a) == {1, 2}
    assert labels.of([]) == 0
