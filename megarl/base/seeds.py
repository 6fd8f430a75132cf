"""Derivation of random seeds: one seed per sample, turn or request from the seed of a run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """Derive a seed of 63 bits from any number of parts, by BLAKE2b.

    The same parts give the same seed in every process and on every machine. A change of one part gives an
    independent seed.

    Args:
        *parts: numbers and strings, such as a row's seed and the index of the sample; joined by ``/``.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
