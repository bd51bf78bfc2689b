"""The random numbers of `sample`: bits, keys, noise."""

from __future__ import annotations

import math

import pytest
import torch
from batchgen_kernels.launch import Launch, jit, tl
from batchgen_kernels.philox import GROUP_DRAWS, WORD, gumbel, philox, random_bits
from batchgen_kernels.sample_math import gumbel as triton_gumbel
from batchgen_kernels.sample_math import random_bits as triton_random_bits

# Known answers published with the reference implementation (Random123, kat_vectors): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

FIRST = torch.tensor([0])


def keys(seed: int = 0, source: int = 0, row: int = 0, sample: int = 0, position: int = 0) -> torch.Tensor:
    return torch.tensor([[seed, source, row, sample, position]])


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's own integers."""
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [right >> 32 ^ counter[1] ^ key[0], right & WORD, left >> 32 ^ counter[3] ^ key[1], left & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = philox(
        torch.tensor(key[0]),
        torch.tensor(key[1]),
        (torch.tensor(counter[0]), torch.tensor(counter[1]), torch.tensor(counter[2]), torch.tensor(counter[3])),
    )
    assert tuple(int(word) for word in words) == answer


def test_a_draw_is_keyed_as_the_module_says() -> None:
    seed, source, row, sample, position = 2**62 + 12345, 3, 2**40 + 7, 5, 77
    identity = philox_of_integers([row & WORD, row >> 32, source, sample], [seed & WORD, seed >> 32])
    for first in (0, 4096, 151_932, GROUP_DRAWS):
        expected = [
            philox_of_integers([draw // 4, position, identity[2], identity[3]], identity[:2])[draw % 4]
            for draw in range(first, first + 7)
        ]
        bits = random_bits(keys(seed, source, row, sample, position), torch.tensor([first]), 7)
        assert bits.tolist() == [expected]


def test_every_part_of_the_key_changes_the_bits() -> None:
    variants = [keys(), keys(seed=1), keys(seed=2**32), keys(source=1), keys(row=1), keys(row=2**32), keys(sample=1)]
    streams = [random_bits(key, FIRST, 64) for key in [*variants, keys(position=1)]]
    for index, stream in enumerate(streams):
        for other in streams[:index]:
            assert (stream == other).sum() == 0  # 64 chance meetings of 32-bit words: probability 1.5e-8 a pair


def test_noise_is_finite_for_every_extreme_word() -> None:
    noise = gumbel(torch.tensor([0, 1, 2**26, 2**31, WORD - 1, WORD]))
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(33 * math.log(2), rel=1e-6)
    assert (noise.diff() <= 0).all()


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel(random_bits(keys(seed=9), FIRST, 200_000)).double().squeeze(0)
    # Five standard errors each: a false alarm has probability below 1e-6.
    assert noise.mean().item() == pytest.approx(0.5772157, abs=5 * 1.2825 / math.sqrt(200_000))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=5 * 3.4 / math.sqrt(200_000))


def test_noise_equals_a_double_precision_formula() -> None:
    bits = random_bits(keys(seed=4), FIRST, 50_000).squeeze(0)
    bits = torch.cat((bits, torch.arange(1, 2**27, 999_983)))
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-u))
    torch.testing.assert_close(gumbel(bits).double(), exact, rtol=0, atol=4e-6)


@jit
def _noise_kernel(
    keys_ptr: tl.tensor, bits_ptr: tl.tensor, noise_ptr: tl.tensor, first: int, DRAWS: tl.constexpr
) -> None:
    """Store the words and the noise of the draws first, first + 1, ... of one row."""
    row = tl.program_id(0)
    index = row * DRAWS + tl.arange(0, DRAWS)
    bits = triton_random_bits(keys_ptr + row * 5, tl.arange(0, DRAWS) + first)
    tl.store(bits_ptr + index, bits.to(tl.int64))
    tl.store(noise_ptr + index, triton_gumbel(bits))


@pytest.mark.parametrize("first", [0, 151_936])
def test_triton_has_exactly_the_same_bits_and_nearly_the_same_noise(first: int) -> None:
    table = torch.cat(
        (keys(), keys(2**63 - 1, 2**32 - 1, 2**63 - 1, 2**32 - 1, 2**32 - 1), keys(2**40 + 1, 2, 3, 4, 5))
    )
    bits, noise = torch.zeros(3, 64, dtype=torch.int64), torch.zeros(3, 64)
    arguments = {"keys_ptr": table, "bits_ptr": bits, "noise_ptr": noise, "first": first}
    Launch(_noise_kernel, (3,), arguments, {"DRAWS": 64}).run()
    expected = random_bits(table, torch.full((3,), first), 64)
    assert torch.equal(bits, expected)
    torch.testing.assert_close(noise, gumbel(expected), rtol=0, atol=2e-6)
