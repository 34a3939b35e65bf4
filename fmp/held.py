"""Large values on their way to where they are used up.

A tensor is freed when the last one that refers to it lets go, and each function that it passes through refers to it, by
a variable, until it returns. So large values pass in a `Held`, and whoever uses one up takes it out:

    def outer(held):
        return inner(held)              # what is taken out in there has no name here

    def inner(held):
        return kernel(held.take("x"))   # kernel alone holds x, and frees it with `del x`

A call with `*` or `**` would hold all that it passes until it returns.
"""

from typing import Any


class Held:
    """Values by name, each of which can be taken out once.

    Example:
        >>> held = Held(grads=[1.0], state=None)
        >>> held.take("grads")
        [1.0]
        >>> held.take("grads")
        Traceback (most recent call last):
        KeyError: 'grads'
    """

    def __init__(self, **values: Any):
        self._values = values

    def take(self, name: str) -> Any:
        """Takes a value out, so that the caller alone holds it.

        Raises:
            KeyError: If there is none of this name, or it was taken before.
        """
        return self._values.pop(name)
