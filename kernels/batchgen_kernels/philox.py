"""Philox4x32-10, the counter-based random numbers of `sample`, and how a draw is keyed.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All words are 32 bits wide; a row of `keys_R5`
(int64) is (seed, source, row, sample, position):

    identity = philox(key = (seed low, seed high), counter = (row low, row high, source, sample))       once per row
    noise[d] = philox(key = (identity[0], identity[1]), counter = (d // 4, position, identity[2], identity[3]))[d % 4]

seed < 2^63; row < 2^63; source, sample, position < 2^32. Philox is a bijection of its counter, so under one seed no two
(source, row, sample) share a stream. Draw d = token id is the noise of that token, and d = GROUP_DRAWS + g that of
group g of the vocabulary (`batchgen_kernels.sample`). The C++ and Triton twins give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

SEED, SOURCE, ROW, SAMPLE, POSITION = range(5)
"""Columns of `keys_R5`; position is the number of tokens that the sample has already."""

GROUP_DRAWS = 1 << 31
"""First draw of the groups; token ids lie below."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _round(counter: Words, key_0: Tensor, key_1: Tensor) -> Words:
    # int64 products wrap modulo 2^64, which leaves both 32-bit halves right.
    product_0, product_1 = counter[0] * MULTIPLIER_0, counter[2] * MULTIPLIER_1
    return (
        ((product_1 >> 32) & WORD) ^ counter[1] ^ key_0,
        product_1 & WORD,
        ((product_0 >> 32) & WORD) ^ counter[3] ^ key_1,
        product_0 & WORD,
    )


def philox(key_0: Tensor, key_1: Tensor, counter: Words) -> Words:
    """Return four words for each counter; all are int64 tensors of values below 2^32 whose shapes broadcast."""
    for _ in range(ROUNDS):
        counter = _round(counter, key_0, key_1)
        key_0, key_1 = (key_0 + WEYL_0) & WORD, (key_1 + WEYL_1) & WORD
    return counter


def identities(keys_R5: Tensor) -> Words:
    """Return the four identity words of each row, int64 [R] each."""
    seed, source, row, sample, _ = keys_R5.unbind(1)
    return philox(seed & WORD, seed >> 32, (row & WORD, row >> 32, source, sample))


def random_bits(keys_R5: Tensor, first_R: Tensor, count: int) -> Tensor:
    """Return the noise words [R, count] of draws first, first + 1, ... of each row, as int64 below 2^32.

    `first_R` (int64) must be multiples of 4: each counter gives four neighbouring draws.
    """
    key_0, key_1, high_0, high_1 = (word.unsqueeze(1) for word in identities(keys_R5))
    quads_RD = (first_R >> 2).unsqueeze(1) + torch.arange(-(-count // 4), device=keys_R5.device)
    words = philox(key_0, key_1, (quads_RD, keys_R5[:, POSITION, None], high_0, high_1))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def gumbel(bits: Tensor) -> Tensor:
    """Turn words into standard Gumbel noise, fp32: -log(-log(1 - u)) with u = (bits + 1/2) / 2^32.

    -log(1 - u) is a series where 1 - u would lose u's last bits, so that the noise reaches 22.9, not 16.6: tokens of
    probability 1e-9 are drawn as often as they should.
    """
    u = torch.clamp((bits.to(torch.float32) + 0.5) * 2.0**-32, max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -torch.log(torch.where(u < 2.0**-6, series, -torch.log(1 - u)))
