"""The one error that a user can cause: printed as one line, exit status 2."""


class UserError(ValueError):
    """What a user typed or pointed at cannot be used.

    Args:
        key: the configuration key, flag or file that has to change.
        found: what was found there.
        fix: what to do about it.
    """

    def __init__(self, key: str, found: str, fix: str) -> None:
        super().__init__(f"{key}: {found}; {fix}")
        self.key, self.found, self.fix = key, found, fix

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        return type(self), (self.key, self.found, self.fix)
