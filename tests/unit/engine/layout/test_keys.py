from lockstep.engine.layout import keys


def test_keys_are_fixed_for_ever() -> None:
    # Frozen: another value here means that no finished run could be reproduced.
    assert keys.derive(0, keys.INIT) == KEY_INIT
    assert keys.derive(7, keys.SAMPLE, 0, 1, 2) == KEY_SAMPLE


def test_keys_differ_in_every_argument() -> None:
    derived = [
        keys.derive(seed, purpose, first, second)
        for seed in (-1, 0, 1)
        for purpose in (keys.SAMPLE, keys.FORWARD)
        for first in range(5)
        for second in range(5)
    ]
    assert len(set(derived)) == len(derived)


def test_keys_fit_every_generator() -> None:
    assert all(0 <= keys.derive(0, keys.ORDER, epoch) < 2**63 for epoch in range(1000))


KEY_INIT = 8900787857429490992
KEY_SAMPLE = 8989091443983022113
