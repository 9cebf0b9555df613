"""Results of methods that are kept as long as their object."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def remembered(method: _Method) -> _Method:
    """Return a method that computes once for each object and arguments.

    ``functools.cache`` on a method would keep every object that was ever asked. The object must not change, and a copy of it
    (``copy.copy``) must be alike in what the method reads; what is returned is shared by all callers.
    """
    name = f"_remembered_{method.__name__}"

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.__dict__.get(name)
        if known is None:
            known = self.__dict__[name] = {}
        key = (args, *kwargs.items()) if kwargs else args
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        return known[key]

    return call  # type: ignore[return-value]
