"""What users can catch: everything Expertile raises about their arguments is an ExpertileError."""

from __future__ import annotations


class ExpertileError(Exception):
    """Base of the errors Expertile raises."""


class ArgumentError(ExpertileError, ValueError):
    """An argument has the wrong value, shape, strides or device."""


class DtypeError(ExpertileError, TypeError):
    """An argument has the wrong type or dtype."""
