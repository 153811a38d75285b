"""Tables as plain text."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Format cells in aligned columns.

    Args:
        lines: rows with the same number of cells; the first is the header.
        left: positions of the left-aligned columns; the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
