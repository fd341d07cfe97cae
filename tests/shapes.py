"""Shapes in signatures are checked in every test, but where our own errors are to be reached, and in long runs, which would take two or three times as long."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping


@contextmanager
def unenforced(so: bool = True) -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", so)
    try: yield
    finally: jaxtyping.config.update("jaxtyping_disable", before)
