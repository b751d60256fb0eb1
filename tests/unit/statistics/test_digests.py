"""Digests of bytes: what they tell apart, and that nothing but the bytes decides them."""

import gc
import itertools
import struct
import weakref

import numpy as np
import pytest
import torch

from torchinstruments.statistics import digests
from torchinstruments.statistics.digest_sums import BLOCK_WORDS, HALF_WORDS, WHOLE_WORDS, weights
from torchinstruments.statistics.digests import (
    SMALL_BYTES,
    SMALL_BYTES_ON_DEVICE,
    Digester,
    unsigned,
)
from torchinstruments.statistics.transfer import DeviceNumbers
from unit.statistics.accelerator import DEVICE, Accelerator, put

WHOLE = Digester()
SMALLEST = Digester(1)
"""Takes a block at a time."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def splitmix(number: int) -> int:
    """Returns a number of splitmix64 from its state 0, made odd."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) | 1


def moved(words: list[int], factor: int, num_bytes: int) -> int:
    """Returns the products of words, one behind the other, moved up in memory, as one number."""
    products = b"".join((word * factor % 2**64).to_bytes(8, "little") for word in words)
    return int.from_bytes(products, "little") << 8 * num_bytes


def by_definition(data: bytes) -> int:
    """Returns the digest of bytes in the plainest way there is."""
    data = data + bytes(-len(data) % 8)
    words = [word for (word,) in struct.iter_unpack("<Q", data)]
    total = 0
    for block in range(-(-len(words) // BLOCK_WORDS)):
        of_block = words[BLOCK_WORDS * block :][:BLOCK_WORDS]
        half = len(of_block) if len(of_block) <= WHOLE_WORDS else -(-len(of_block) // 2)
        first = moved(of_block[:half], 0xD6E8FEB86659FD93, 4)
        second = moved(of_block[half:], 0xA0761D6478BD642F, 2)
        mixed = (first ^ second).to_bytes(8 * HALF_WORDS + 8, "little")
        for index, (word,) in enumerate(struct.iter_unpack("<Q", mixed)):
            if word:
                total += splitmix(index) * splitmix((1 << 40) + block) * word
    return total % 2**64


def on_device(tensor: torch.Tensor, digester: Digester = WHOLE) -> int:
    """Returns what the variant for devices finds, here on the CPU."""
    return unsigned(int(digester.on_device(tensor).item()))


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    """Returns bytes of all values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns a tensor of any bits; of a bool, those that it may have."""
    if dtype == torch.bool:
        return random_bytes(int(np.prod(shape))).view(*shape) > 127
    return random_bytes(int(np.prod(shape)) * dtype.itemsize).view(dtype).view(*shape)


@pytest.mark.parametrize(
    "count",
    [
        *(0, 1, 7, 8, 9, 64, 8 * WHOLE_WORDS, 8 * WHOLE_WORDS + 1, 8 * WHOLE_WORDS + 9),
        *(8 * BLOCK_WORDS - 1, 8 * BLOCK_WORDS, 8 * BLOCK_WORDS + 3, 16 * BLOCK_WORDS),
    ],
)
def test_a_digest_is_what_it_is_defined_to_be_on_the_host_and_on_a_device(count: int) -> None:
    """Whatever the number of bytes: a last word and a last block may be parts."""
    data = random_bytes(count)
    expected = by_definition(data.numpy().tobytes())
    for digester in (WHOLE, SMALLEST):
        assert digester.on_host(data) == expected
        assert on_device(data, digester) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_its_bytes(dtype: torch.dtype) -> None:
    """The digest of a tensor is that of its bytes, and no number is rounded on the way."""
    tensor = some(dtype, 5, 7)
    expected = by_definition(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    assert WHOLE.on_host(tensor) == on_device(tensor) == expected
    assert WHOLE.on_host(tensor[2, 3].clone()) == on_device(tensor[2, 3].clone())


@pytest.mark.parametrize("count", [1, 8, 19])
def test_each_single_bit_of_a_small_tensor_changes_the_digest(count: int) -> None:
    """No two of the tensors that differ from it in one bit share a digest with it or with each other."""
    data = random_bytes(count)
    digests = {WHOLE.on_host(data)}
    for byte, bit in itertools.product(range(count), range(8)):
        flipped = data.clone()
        flipped[byte] ^= 1 << bit
        assert WHOLE.on_host(flipped) == on_device(flipped)
        digests.add(WHOLE.on_host(flipped))
    assert len(digests) == 1 + 8 * count


def test_a_single_bit_anywhere_in_a_large_tensor_changes_the_digest() -> None:
    """In every block, at every place of a word."""
    tensor = torch.randn(300_001, generator=torch.Generator().manual_seed(3))
    data = tensor.view(torch.uint8)
    before = WHOLE.on_host(tensor)
    generator = np.random.default_rng(5)
    for place in generator.integers(0, 8 * data.numel(), 300).tolist():
        byte, bit = divmod(place, 8)
        data[byte] ^= 1 << bit
        assert WHOLE.on_host(tensor) != before
        data[byte] ^= 1 << bit
    assert WHOLE.on_host(tensor) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_change_of_one_entry_changes_the_digest(dtype: torch.dtype) -> None:
    """Also where it reaches into the word before, or stands at the end of a block."""
    tensor = some(dtype, 2 * 8 * BLOCK_WORDS // dtype.itemsize + 3)
    bits = tensor.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    before = WHOLE.on_host(tensor)
    generator = np.random.default_rng(7)
    in_block = 8 * BLOCK_WORDS // dtype.itemsize
    edges = [0, 1, 2, 3, in_block - 2, in_block - 1, in_block, in_block + 1, len(tensor) - 2, len(tensor) - 1]
    for place in [*edges, *generator.integers(0, len(tensor), 100).tolist()]:
        entry = bits[place].clone()
        bits[place] ^= int(generator.integers(1, 2 ** (8 * dtype.itemsize - 1)))
        assert WHOLE.on_host(tensor) != before
        bits[place] = entry
    assert WHOLE.on_host(tensor) == before


@pytest.mark.parametrize("num_words", [2, WHOLE_WORDS + 1, HALF_WORDS + 3, BLOCK_WORDS + 3])
def test_any_change_of_a_word_changes_the_digest(num_words: int) -> None:
    """Of all of its 8 bytes, or of the upper or lower ones alone, at the edges of halves and blocks."""
    words = some(torch.int64, num_words)
    before = WHOLE.on_host(words)
    generator = np.random.default_rng(7)
    half = (num_words + 1) // 2
    edges = {0, 1, half - 1, half, half + 1, num_words - 1}
    edges |= {HALF_WORDS - 1, HALF_WORDS, HALF_WORDS + 1, BLOCK_WORDS - 1, BLOCK_WORDS}
    for place in sorted(edges & set(range(num_words))):
        word = words[place].clone()
        for shift in (0, 16, 32, 48, 63):
            words[place] = word ^ torch.tensor(int(generator.integers(0, 2**63)) | 1) << shift
            assert WHOLE.on_host(words) != before
        words[place] = word
    assert WHOLE.on_host(words) == before


def test_no_two_top_bits_of_a_block_cancel() -> None:
    """Moved to bit 31 or 15, they leave more of the weights than would have to be equal or opposite."""
    lower = weights(torch.device("cpu")).numpy() % 2**33
    assert len(np.unique(np.concatenate((lower, 2**33 - lower)))) == 2 * len(lower) == 2 * (HALF_WORDS + 1)


def test_an_exchange_of_two_entries_or_of_blocks_is_seen() -> None:
    """The same numbers at other places are other bytes."""
    tensor = torch.randn(4 * BLOCK_WORDS, generator=torch.Generator().manual_seed(3))
    before = WHOLE.on_host(tensor)
    exchanged = tensor.clone()
    exchanged[[10, 11]] = tensor[[11, 10]]
    assert WHOLE.on_host(exchanged) != before
    first, second = tensor.split(2 * BLOCK_WORDS)
    assert WHOLE.on_host(torch.cat((second, first))) != before
    assert WHOLE.on_host(tensor.flip(0)) != before


def test_pairs_of_flipped_signs_are_seen() -> None:
    """The top bit of a word is where plain sums with odd weights are blind: two of them always cancel."""
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    before = WHOLE.on_host(tensor)
    generator = np.random.default_rng(5)
    for _ in range(300):
        pair = torch.from_numpy(generator.choice(100_000, 2, replace=False))
        changed = tensor.clone()
        changed[pair] *= -1
        assert WHOLE.on_host(changed) != before
    assert WHOLE.on_host(-tensor) != before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_a_bit_that_changes_in_every_entry_is_seen(dtype: torch.dtype) -> None:
    """A whole tensor negated, one exponent bit stuck: such changes do not cancel each other."""
    for num_words in (1, 2, 4, 1000, 3000):
        tensor = some(torch.int64, num_words).view(dtype)
        before = WHOLE.on_host(tensor)
        for bit in range(8 * dtype.itemsize):
            mask = torch.tensor([1 << bit], dtype=torch.uint64).view(dtype)[:1]
            flipped = tensor ^ mask
            assert WHOLE.on_host(flipped) != before, (num_words, bit)


def test_zeros_and_nans_of_other_bits_are_told_apart() -> None:
    """Equal to each other by value, or to nothing at all, they are what their bytes are."""
    zeros = torch.tensor([0.0, 1.0])
    assert WHOLE.on_host(zeros) != WHOLE.on_host(torch.tensor([-0.0, 1.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert payloads.isnan().all()
    assert len({WHOLE.on_host(one) for one in payloads}) == 3
    # Signalling ones too, through the copy of a tensor that lies in no order.
    spread = payloads.repeat_interleave(2)[::2]
    assert WHOLE.on_host(spread) == on_device(spread) == WHOLE.on_host(payloads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128, torch.uint8], ids=str)
def test_what_counts_is_the_logical_order(dtype: torch.dtype) -> None:
    """Strides, offsets and the size of pieces have no part in it, also where a copy is made in pieces."""
    plain = some(dtype, 3, 300, 401)
    expected = by_definition(plain.view(-1).view(torch.uint8).numpy().tobytes())
    wide = torch.cat((plain, plain), dim=2)
    offset = torch.cat((plain.view(-1)[:1], plain.view(-1)))[1:].view(plain.shape)
    table = plain.view(1203, 300)
    turned = table.t().contiguous().t()
    others = (plain.permute(2, 0, 1).contiguous().permute(1, 2, 0), wide[:, :, :401], offset)
    for tensor in (plain, *others, turned):
        for digester in (WHOLE, SMALLEST, Digester(2**22)):
            assert digester.on_host(tensor) == expected
            assert on_device(tensor, digester) == expected


def test_a_conjugated_and_an_expanded_tensor_are_their_values() -> None:
    """A flag that is not applied yet, and entries that are repeated by stride 0."""
    numbers = some(torch.complex64, 5)
    assert WHOLE.on_host(numbers.conj()) == WHOLE.on_host(numbers.conj().resolve_conj())
    row = some(torch.float32, 7)
    assert WHOLE.on_host(row.expand(3, 7)) == on_device(row.expand(3, 7)) == WHOLE.on_host(row.repeat(3, 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_a_single_entry_has_its_digest_whatever_its_stride(dtype: torch.dtype) -> None:
    """Torch takes it for contiguous, but not for flat."""
    entry = torch.arange(1, 9).to(dtype)[3:4:3].as_strided((1,), (3,))
    digester = Digester()
    expected = digester.on_host(entry.clone())
    assert digester.on_host(entry) == expected
    assert unsigned(int(digester.on_device(entry))) == expected
    # As the last piece of a strided tensor that is gathered piece by piece.
    strided = some(dtype, 8 * BLOCK_WORDS // dtype.itemsize + 1, 2)[:, 0]
    expected = digester.on_host(strided.clone(memory_format=torch.contiguous_format))
    assert SMALLEST.on_host(strided) == on_device(strided, SMALLEST) == expected


EDGES = (
    *(1, 3, 4, 7, 8, 9, 16, 4093),
    *(SMALL_BYTES + by for by in (-8, 0, 4)),
    *(SMALL_BYTES_ON_DEVICE + by for by in (-8, 0, 9)),
)
"""Sizes in bytes of which several tensors are digested together, and of some that are not."""


def together(tensors: list[torch.Tensor], digester: Digester = WHOLE) -> list[int]:
    """Returns the digests of several tensors on the host, which have to be those that devices give."""
    on_host, failures = digester.several_on_host(tensors)
    assert failures == []
    as_on_device: dict[int, int] = {}
    for places, there in digester.several_on_device(tensors):
        assert not isinstance(there, Exception)
        as_on_device |= zip(places, map(unsigned, there.reshape(-1).tolist()), strict=True)
    assert dict(enumerate(on_host)) == as_on_device
    return [as_on_device[place] for place in range(len(tensors))]


@pytest.mark.parametrize("digester", [WHOLE, SMALLEST], ids=["roomy", "narrow"])
def test_tensors_that_are_read_together_have_the_digests_that_they_have_alone(digester: Digester) -> None:
    """Of all sizes and dtypes, several of each, in any order and layout."""
    tensors = [random_bytes(count, seed) for count in EDGES for seed in range(3)]
    for dtype in DTYPES:
        tensors += [some(dtype, 5, 7), some(dtype, 5, 7).t(), some(dtype, 3, 4), some(dtype, 4, 3).t()]
        tensors += [some(dtype, 0), some(dtype, 0), some(dtype, 1)[0], some(dtype, 1)[0], some(dtype, 9)[2:]]
    tensors += [some(torch.complex64, 4).conj(), some(torch.complex64, 4), torch.empty(0), torch.empty(0, 2)]
    tensors += [torch.tensor([0x7F800001, 1, 0x7FC00001], dtype=torch.int32).view(torch.float32)] * 2
    tensors = tensors[::2] + tensors[1::2]
    alone = [
        by_definition(one.contiguous().resolve_conj().view(-1).view(torch.uint8).numpy().tobytes())
        for one in tensors
    ]
    assert together(tensors, digester) == alone
    assert [digester.on_host(one) for one in tensors] == alone


@pytest.mark.parametrize("count", [*EDGES, 8 * BLOCK_WORDS + 5])
def test_a_bit_at_any_place_of_a_tensor_is_seen_whatever_its_size_and_company(count: int) -> None:
    """In what is read together and in what is read alone, at each byte near an edge and at some others."""
    data = random_bytes(count)
    same = data.clone()
    before, expected = together([data, same])
    assert before == expected
    edges = (0, count // 2, 8 * HALF_WORDS, 8 * BLOCK_WORDS, count)
    near = [edge + by for edge in edges for by in range(-10, 11)]
    near += np.random.default_rng(5).integers(0, count, 10).tolist()
    for place in sorted({place for place in near if 0 <= place < count}):
        bit = 1 << place % 8
        data[place] ^= bit
        changed, unchanged = together([data, same])
        assert changed != before
        assert unchanged == before
        data[place] ^= bit


def test_a_tensor_that_fails_among_others_fails_alone() -> None:
    """The others of its group are read one by one."""
    tensors = [torch.ones(3), torch.ones(3, device="meta"), torch.zeros(3)]
    digester = Digester()
    found, failures = digester.several_on_host(tensors)
    assert [(place, type(error)) for place, error in failures] == [(1, ValueError)]
    assert found == [digester.on_host(tensors[0]), None, 0]


def test_a_failure_keeps_no_tensor_alive() -> None:
    """The frames in which it was raised are not held, in a cycle for one."""
    tensors = [torch.ones(3), torch.ones(3, device="meta")]
    alive = weakref.ref(tensors[0])
    gc.disable()
    try:
        _, failures = Digester().several_on_host(tensors)
        del tensors
        assert len(failures) == 1
        assert alive() is None
    finally:
        gc.enable()


def test_the_number_of_threads_has_no_part_in_it() -> None:
    """Sums of integers do not depend on how they are split."""
    tensor = torch.randn(1_000_003, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    digests = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            digests |= {WHOLE.on_host(tensor), on_device(tensor)}
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_blocks_beyond_the_kept_multipliers_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made when they are needed, and are the same."""
    data = random_bytes(5 * 8 * BLOCK_WORDS + 11)
    expected = WHOLE.on_host(data)
    monkeypatch.setattr(digests, "_NUM_MULTIPLIERS", 2)
    for scratch in (1, 2**28):
        assert Digester(scratch).on_host(data) == on_device(data, Digester(scratch)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_a_device_gives_the_digests_of_the_host_without_a_wait(dtype: torch.dtype) -> None:
    """Nothing is read where they are computed, and one copy brings them all, bit for bit."""
    tensors = [some(dtype, 3), some(dtype, 300, 401), some(dtype, 400, 300).t(), some(dtype, 0, 4)]
    tensors += [some(dtype, count) for count in range(20)] * 2
    digester = Digester(2**20)
    numbers = DeviceNumbers(DEVICE, torch.int64)
    with Accelerator():
        on_it = [put(tensor) for tensor in tensors]
        places = [numbers.add(digester.on_device(tensor)) for tensor in on_it]
        several: dict[int, int] = {}
        for of_them, there in digester.several_on_device(on_it):
            assert isinstance(there, torch.Tensor)
            several |= zip(of_them, itertools.count(numbers.add(there).start))
        numbers.send()
        assert Accelerator.num_host_copies == 0
        found = [unsigned(int(numbers.read(place)[0])) for place in places]
        in_turn = [numbers.read(slice(several[i], several[i] + 1))[0] for i in range(len(on_it))]
        assert Accelerator.num_host_copies == 1
    assert (
        found
        == [unsigned(int(number)) for number in in_turn]
        == [WHOLE.on_host(tensor) for tensor in tensors]
    )
    assert any(digest >= 2**63 for digest in found)


def test_scratch_is_bounded() -> None:
    """A piece is a quarter of the bound at most, also where tensors are gathered or read together."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        """Notes the largest tensor that an operation made, views left out."""

        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
                Largest.num_bytes = max(Largest.num_bytes, result.untyped_storage().nbytes())
            return result

    tensor = torch.randn(3000, 1001)
    digester = Digester(4 * 2**20)
    WHOLE.on_host(tensor), digester.on_device(tensor[:1])
    small = list(torch.randn(200, 8000))
    for tensors in ([tensor], [tensor.t().contiguous().t()], small):
        with Largest():
            list(digester.several_on_device(tensors))
    assert 0 < Largest.num_bytes <= 2**20
