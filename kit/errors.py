"""One base for every error the kit raises on purpose: what happened, what was expected, what to do."""


class KitError(Exception):
    """The message is meant for a person; the command line prints it without a traceback."""


class ArgumentError(KitError, ValueError):
    """An argument that cannot work."""
