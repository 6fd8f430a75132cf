import hashlib

from megarl.base.seeds import derive_seed


def test_seeds_are_63_bits_of_blake2b_of_the_joined_parts():
    digest = hashlib.blake2b(b"7/turn 2/1", digest_size=8).digest()
    assert derive_seed(7, "turn 2", 1) == int.from_bytes(digest, "little") >> 1
    assert derive_seed(1, 0) == 2709669515671555460


def test_different_parts_give_different_seeds():
    seeds = {derive_seed(seed, sample) for seed in range(40) for sample in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)
