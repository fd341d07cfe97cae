"""What tests of our own error messages share."""

from collections.abc import Callable, Sequence

import pytest


def refuses(call: Callable[[], object], parts: Sequence[str], error: type[Exception] = ValueError) -> None:
    "Assert that a call raises, with a message that holds these parts one behind the other: the thing, what would be right, the value."
    with pytest.raises(error) as caught: call()
    rest = message = str(caught.value)
    for part in parts:
        assert part in rest, (part, message)
        rest = rest[rest.index(part) + len(part) :]
