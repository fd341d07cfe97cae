"""The type checker that enforces the shapes in signatures while testing. It must not import `minigpt`, which is not hooked yet when this is."""

from beartype import BeartypeConf, beartype

# Integers pass for floats (PEP 484), so that `temperature=0` and `dropout=0` are as good as 0.0.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
